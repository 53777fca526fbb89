"""Files of instruments: read at full depth with their own scale, and results written like them."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from toy_models import stand_in_model
from typer.testing import CliRunner

from mmdgs.cli.app import app
from mmdgs.data.instruments import parse_range
from mmdgs.data.single import named_images
from mmdgs.errors import UsageError

tifffile = pytest.importorskip("tifffile")
fits = pytest.importorskip("astropy.io.fits")
RNG = np.random.default_rng(0)
COUNTS = RNG.integers(200, 900, (3, 8, 8), dtype=np.uint16)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 x 8 grey images, and a stack of three frames of a microscope."""
    root = tmp_path_factory.mktemp("instruments")
    stand_in_model(root / "model", (1, 8, 8))
    tifffile.imwrite(
        root / "stack.tif", COUNTS, imagej=True, resolution=(4.0, 4.0),
        metadata={"axes": "TYX", "unit": "um", "finterval": 0.5},
    )  # fmt: skip
    return root


def restored(folder: Path, source: Path, out: str, *words: object) -> dict[str, Any]:
    result = run(
        "restore", folder / "model", source, "--operator", "none", "--out", folder / out,
        "--draws", 2, "--steps", 2, *words,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads((folder / out / "restored.json").read_text())
    return {**content, "said": result.output, "files": folder / out / "files"}


def test_a_stack_comes_back_as_a_stack_in_its_own_units(folder: Path, caplog) -> None:
    """Type, axes, pixel size and frame time; noise in counts; the mean is that of the draws."""
    words = ("--range", "100,1100", "--noise", "poisson:2,5")
    content = restored(folder, folder / "stack.tif", "stack", *words)
    assert [image["name"] for image in content["images"]] == ["stack-0", "stack-1", "stack-2"]
    (image, *_) = content["images"]
    # An offset of 0 counts is -0.1 of the range.
    assert [image[key] for key in ("gain", "read", "offset")] == pytest.approx([2e-3, 5e-3, -0.1])
    with np.load(folder / "stack" / "draws.npz") as arrays:
        draws = arrays["draws"]
    names = ["stack-draw-0.tif", "stack-draw-1.tif", "stack-mean.tif", "stack-std.tif"]
    assert sorted(file.name for file in content["files"].iterdir()) == names
    for name, values in (("mean", draws.mean(0)), ("draw-1", draws[1])):
        with tifffile.TiffFile(content["files"] / f"stack-{name}.tif") as file:
            page, stored = file.pages[0], file.asarray()
            assert file.is_imagej
            assert file.series[0].axes == "TYX"
            assert file.imagej_metadata["unit"] == "um"
            assert file.imagej_metadata["finterval"] == 0.5
            assert page.tags["XResolution"].value == (4, 1)
        assert stored.dtype == np.uint16
        expected = (100 + 1000 * values[:, 0].astype(np.float64)).clip(0, 65535).round()
        assert np.abs(stored - expected).max() <= 1  # float32 may round the other way
    assert "clips" not in caplog.text
    spread = tifffile.imread(content["files"] / "stack-std.tif")
    assert spread.dtype == np.float32
    np.testing.assert_allclose(spread, 1000 * draws.std(0, ddof=1)[:, 0], rtol=1e-3)
    again = restored(folder, folder / "stack.tif", "stack", *words, "--resume")
    assert again["images"] == content["images"]
    restored(folder, folder / "stack.tif", "low", "--range", "800,9000", "--noise", 900)
    assert caplog.text.count("which clips up to") == 1  # counts below zero, in several files


def test_a_folder_of_kinds_is_one_batch(folder: Path) -> None:
    """FITS with its header and unknown pixels, OME, a 32-bit TIFF: each on its own scale."""
    kinds = folder / "kinds"
    kinds.mkdir()
    values = COUNTS[0].astype(np.float32)
    values[2, 3] = np.nan
    header = fits.Header({"CTYPE1": "RA---TAN", "CRPIX1": 4.5, "TELESCOP": "none"})
    fits.writeto(kinds / "sky.fits", values, header)
    fits.writeto(kinds / "unsigned.fits", COUNTS[1], fits.Header({"OBJECT": "M13"}))
    tifffile.imwrite(
        kinds / "cells.ome.tif", COUNTS[:2, None], ome=True,
        metadata={"axes": "ZCYX", "PhysicalSizeX": 0.2, "PhysicalSizeXUnit": "µm"},
    )  # fmt: skip
    tifffile.imwrite(kinds / "long.tif", COUNTS[2].astype(np.int32))
    content = restored(folder, kinds, "out", "--range", "0,1000", "--noise", "50")
    names = ["cells-0", "cells-1", "long", "sky", "unsigned"]
    assert [image["name"] for image in content["images"]] == names
    assert [image["noise"] for image in content["images"]] == pytest.approx([0.05] * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fits.open(content["files"] / "sky-mean.fits") as units:
            assert units[0].header["CTYPE1"] == "RA---TAN"
            assert units[0].header["CRPIX1"] == 4.5
            assert np.isfinite(units[0].data).all()  # what was not measured is drawn, too
            assert units[0].data.dtype.kind == "f"
        with fits.open(content["files"] / "unsigned-draw-0.fits") as units:
            assert units[0].header["OBJECT"] == "M13"
            assert units[0].data.dtype == np.uint16
    with tifffile.TiffFile(content["files"] / "cells-mean.ome.tif") as file:
        assert file.series[0].axes == "ZYX"  # of one channel
        assert 'PhysicalSizeX="0.2"' in file.ome_metadata
        assert file.asarray().dtype == np.uint16
    spread = tifffile.TiffFile(content["files"] / "cells-std.ome.tif")
    with spread as file:
        assert file.asarray().dtype == np.float32
        assert 'Type="float"' in file.ome_metadata
    assert tifffile.imread(content["files"] / "long-mean.tif").dtype == np.int32


def test_what_maps_to_the_unit_interval_is_said(folder: Path) -> None:
    """Nothing is clipped, and numbers without a white of their own need a range."""
    tifffile.imwrite(folder / "signed.tif", COUNTS[0].astype(np.int16) - 500)
    with pytest.raises(UsageError, match=r"int16 values lie between .* --range"):
        named_images([str(folder / "signed.tif")])
    (image,) = named_images([str(folder / "signed.tif")], given=parse_range("-100,300"))
    expected = (COUNTS[0].astype(np.float64) - 400) / 400
    np.testing.assert_allclose(image.image[0].numpy(), expected, rtol=1e-6)
    assert image.image.min() < 0
    assert image.noise(40.0) == pytest.approx(0.1), "in the units of the file"
    shares = named_images([str(folder / "stack.tif")], given=parse_range("1%,99%"))
    low, high = np.percentile(COUNTS, [1, 99])
    assert (shares[0].scale.low, shares[0].scale.high) == pytest.approx((low, high))
    assert shares[2].scale == shares[0].scale  # one for the whole stack
    Image.fromarray(COUNTS[0].astype(np.uint8)).save(folder / "eight.png")
    (small,) = named_images([str(folder / "eight.png")], given=parse_range("10,20"))
    np.testing.assert_allclose(
        small.image[0].numpy(), (COUNTS[0].astype(np.uint8) - 10.0) / 10, atol=1e-5
    )
    (plain,) = named_images([str(folder / "eight.png")])
    assert plain.noise(0.1) == 0.1
    for text in ("1", "3,1", "a,b", "5%,101%", "nan,1"):
        with pytest.raises(UsageError, match="--range"):
            parse_range(text)


def test_a_map_of_noise_comes_from_a_file(folder: Path) -> None:
    """In the units of the image; one plane for all frames, or one for each; `posterior` too."""
    deviations = np.linspace(20, 80, 64, dtype=np.float32).reshape(8, 8)
    tifffile.imwrite(folder / "noise.tif", deviations)
    words = ("--range", "100,1100", "--noise", folder / "noise.tif")
    content = restored(folder, folder / "stack.tif", "mapped", *words)
    rms = np.sqrt(np.square(deviations / 1000).mean())
    assert [image["noise"] for image in content["images"]] == pytest.approx([rms] * 3)
    result = run(
        "posterior", folder / "model", folder / "stack.tif", "--range", "100,1100", "--sigma",
        folder / "noise.tif", "--out", folder / "seen", "--draws", 2, "--n", 1, "--draws-by",
        "spectral",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads((folder / "seen" / "posterior.json").read_text())
    assert record["images"][0]["sigma"] == pytest.approx(rms)
    assert "draws" in record["images"][0]["remarks"][0]
    assert tifffile.imread(folder / "seen" / "stack-0" / "stack-0-mean.tif").dtype == np.uint16
    assert tifffile.imread(folder / "seen" / "stack-0" / "stack-0-std.tif").dtype == np.float32
    for wrong in (deviations[:4], np.stack([deviations, deviations])):
        tifffile.imwrite(folder / "wrong.tif", wrong)
        result = run(
            "restore", folder / "model", folder / "stack.tif", "--operator", "none", "--noise",
            folder / "wrong.tif", "--range", "0,1000", "--out", folder / "no",
        )  # fmt: skip
        assert result.exit_code == 2
        assert "wrong.tif" in result.output.replace("\n", "")
        assert not (folder / "no").exists()


def test_clipped_values_are_told_of_once(folder: Path) -> None:
    """They are bounds, unless they are kept; images without any are as they were."""
    levels = np.full((8, 8), 100, np.uint8)
    levels[:2], levels[-1] = 0, 255
    Image.fromarray(levels).save(folder / "clipped.png")
    noise = ("--noise", 0.1)
    content = restored(folder, folder / "clipped.png", "bounds", *noise)
    said = " ".join(content["said"].split())
    assert "25% of the values lie at 0 and 12% at full scale" in said
    kept = restored(folder, folder / "clipped.png", "kept", *noise, "--keep-clipped")
    assert "full scale" not in kept["said"]
    draws = [np.load(folder / name / "draws.npz")["mean"][0, 0] for name in ("bounds", "kept")]
    assert (draws[0] - draws[1])[:2].mean() < -0.01  # a bound of 0 draws nothing up to 0
    inner = np.full((8, 8), 100, np.uint8)
    Image.fromarray(inner).save(folder / "inner.png")
    plain = restored(folder, folder / "inner.png", "inner", *noise)
    same = restored(folder, folder / "inner.png", "inner kept", *noise, "--keep-clipped")
    assert "full scale" not in plain["said"]
    with (
        np.load(folder / "inner" / "draws.npz") as a,
        np.load(folder / "inner kept" / "draws.npz") as b,
    ):
        assert np.array_equal(a["draws"], b["draws"])
    assert same["images"] == plain["images"]


@pytest.mark.parametrize(
    ("noise", "said"),
    [("poisson", "poisson:GAIN"), ("poisson:-1", "gain"), ("poisson:1,2,3,4", "poisson:GAIN"),
     ("missing.tif", "map of standard deviations"), ("estimate-poisson", "patches")],
)  # fmt: skip
def test_noise_that_is_none_is_refused(folder: Path, noise: str, said: str) -> None:
    result = run(
        "restore", folder / "model", folder / "stack.tif", "--operator", "none", "--noise", noise,
        "--out", folder / "none",
    )  # fmt: skip
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_missing_library_and_a_damaged_file_have_a_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.fits").write_bytes(b"SIMPLE  = T" + bytes(100))
    with pytest.raises(UsageError, match=r"broken\.fits cannot be read"):
        named_images([str(tmp_path / "broken.fits")])
    fits.PrimaryHDU().writeto(tmp_path / "table.fits")
    with pytest.raises(UsageError, match="no part of it is an image"):
        named_images([str(tmp_path / "table.fits")])
    with caplog.at_level(logging.WARNING, "mmdgs"):
        monkeypatch.setitem(sys.modules, "tifffile", None)
        (first,) = named_images([str(folder / "stack.tif")])  # by Pillow
    assert "mmdgs[science]" in caplog.text
    assert torch.allclose(first.image[0], torch.from_numpy((COUNTS[0] + 0.5) / 65536).float())
    monkeypatch.setitem(sys.modules, "astropy.io", None)
    monkeypatch.setitem(sys.modules, "astropy", None)
    with pytest.raises(UsageError, match=r"pip install .mmdgs\[science\]"):
        named_images([str(tmp_path / "table.fits")])
