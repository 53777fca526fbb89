"""Images of more than 8 bits a channel, with transparency or in floating point: nothing is lost in
silence.
"""

from __future__ import annotations

import io
import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import deep_png, deep_tiff
from PIL import Image
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs.cli.app import app
from mmdgs.data import load_images
from mmdgs.data.decoding import Fit, decode_deep
from mmdgs.data.single import named_images
from mmdgs.errors import UsageError
from mmdgs.restoration import folder as restored_folder
from mmdgs.studio.sources import in_units, uploaded

run = CliRunner().invoke
RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 1 << 16, (9, 8, 4), dtype=np.uint16)


def pillow(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def read(tmp_path: Path, content: bytes, name: str = "a.png") -> torch.Tensor:
    (tmp_path / name).write_bytes(content)
    (image,) = named_images([str(tmp_path / name)])
    return image.image


def midpoints(levels: np.ndarray, bits: int = 16) -> torch.Tensor:
    return torch.from_numpy(((levels + 0.5) / (1 << bits)).astype(np.float32)).permute(2, 0, 1)


FILES = {
    "colour.png": (deep_png(DEEP[..., :3]), DEEP[..., :3]),
    "white is zero.tiff": (deep_tiff(65535 - DEEP[..., :1], photometric=0), DEEP[..., :1]),
    "colour, big-endian.tiff": (deep_tiff(DEEP[..., :3], ">"), DEEP[..., :3]),
    "compressed.tiff": (
        pillow(Image.fromarray(DEEP[..., 0]), "TIFF", compression="tiff_lzw"),
        DEEP[..., :1],
    ),
    "grey.ppm": (b"P5 8 9 65535\n" + DEEP[..., 0].astype(">u2").tobytes(), DEEP[..., :1]),
}


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, remarks included."""
    with caplog.at_level(logging.INFO, "mmdgs"):
        yield caplog


@pytest.mark.parametrize("name", FILES)
def test_sixteen_bits_are_all_kept(tmp_path: Path, name: str, caplog) -> None:
    content, levels = FILES[name]
    image = read(tmp_path, content, name)
    assert torch.equal(image, midpoints(levels))
    (record,) = caplog.records
    assert f"{levels.min():,} and {levels.max():,}" in record.getMessage()


def test_twelve_bits_in_sixteen_are_announced(tmp_path: Path, caplog) -> None:
    levels = np.arange(4096, dtype=np.uint16).reshape(64, 64, 1)
    image = read(tmp_path, deep_png(levels))
    assert len(image.unique()) == 4096  # 12-bit data of 16 bits had 16 distinct values
    assert torch.equal(image, midpoints(levels))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "data of 12 bits" in record.getMessage()


@pytest.mark.parametrize("kind", ["rgba.png", "palette.png", "la16.png", "rgba16.tiff"])
def test_transparency_is_laid_over_white(tmp_path: Path, kind: str, caplog) -> None:
    """A colour of level 100 of 256 at alpha 1 / 5 on the left, opaque on the right."""
    alpha = np.where(np.arange(8) < 4, 51, 255) * np.ones((9, 1))
    bits = 16 if "16" in kind else 8
    scale = 257 if bits == 16 else 1
    channels = 1 if "la" in kind and "palette" not in kind else 3
    level = 100 * scale
    levels = np.stack([np.full((9, 8), level)] * channels + [alpha * scale], -1).astype(np.uint16)
    if kind == "palette.png":
        picture = Image.fromarray((alpha < 255).astype(np.uint8)).convert("P")
        picture.putpalette([100, 100, 100] * 2)
        content = pillow(picture, transparency=bytes([255, 51]))
    elif bits == 8:
        content = pillow(Image.fromarray(levels.astype(np.uint8)))
    else:
        content = deep_png(levels) if kind.endswith("png") else deep_tiff(levels)
    image = read(tmp_path, content, kind)
    assert image.shape == (channels, 9, 8)
    colour = (level + 0.5) / (1 << bits)
    assert torch.allclose(image[..., 4:], torch.tensor(colour), atol=1e-7)
    assert torch.allclose(image[..., :4], torch.tensor(0.2 * colour + 0.8), atol=1e-6)
    assert "transparent" in caplog.text


def test_floating_point_tiff(tmp_path: Path) -> None:
    values = RNG.random((9, 8, 1), dtype=np.float32)
    image = read(tmp_path, deep_tiff(values), "a.tiff")
    assert np.array_equal(image.permute(1, 2, 0).numpy(), values)
    for wrong in ((values * 3).astype(np.float32), DEEP[..., :1].astype(np.int32)):
        with pytest.raises(UsageError, match=r"a\.tiff.*between.*--range"):
            read(tmp_path, deep_tiff(wrong), "a.tiff")
    missing = np.where(values > 0.5, np.nan, values).astype(np.float32)
    image = read(tmp_path, deep_tiff(missing), "a.tiff")  # NaN: not measured
    assert np.array_equal(image.permute(1, 2, 0).numpy(), missing, equal_nan=True)


def test_an_orientation_turns_all_bytes(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    content = deep_png(DEEP[..., :3])
    turned = content[:33] + _chunk(b"eXIf", exif.tobytes()[6:]) + content[33:]
    image = read(tmp_path, turned)
    assert torch.equal(image, midpoints(DEEP[..., :3]).rot90(-1, (1, 2)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_set_says_that_bits_are_lost(tmp_path: Path, caplog) -> None:
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(deep_png(DEEP[..., :3]))
    images = load_images(tmp_path).images
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), DEEP[..., :3] >> 8)
    (record,) = caplog.records
    assert "reduced to 8" in record.getMessage()


def test_deep_images_are_resized_in_floating_point() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[:, None, None] * np.ones(
        (1, 64, 1), np.uint16
    )
    small = decode_deep(deep_png(ramp), Fit(size=16)).pixels
    assert small.shape == (1, 16, 16)
    expected = ramp.reshape(16, 4, 64)[..., 0].mean(1) / 65536
    assert np.abs(small[0, 3:-3, 0] - expected[3:-3]).max() < 1e-4  # in 8 bits: 2e-3


def test_an_upload_keeps_its_depth(tmp_path: Path) -> None:
    model = many_level_model((3, 9, 8))
    (tmp_path / "a.png").write_bytes(deep_png(DEEP[..., :3]))
    assert torch.equal(in_units(uploaded(tmp_path / "a.png", model)), midpoints(DEEP[..., :3]))
    (tmp_path / "b.png").write_bytes(pillow(Image.fromarray((DEEP[..., :3] >> 8).astype(np.uint8))))
    assert uploaded(tmp_path / "b.png", model).dtype == np.uint8


@pytest.mark.parametrize("name", ["a.png", "a.npz"])
def test_restore_and_posterior_take_the_numbers_as_they_are(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurements that the commands work on, through a mask that keeps everything."""
    model = many_level_model((1, 8, 8))
    model.save_pretrained(tmp_path / "model")
    levels = DEEP[:8, :, :1]
    values = midpoints(levels).numpy()
    values = values if name == "a.png" else values * 1.5 - 0.25  # noise goes beyond [0, 1]
    if name == "a.png":
        (tmp_path / name).write_bytes(deep_png(levels))
    else:
        np.savez(tmp_path / name, x=values[None])
    common = [str(tmp_path / "model"), str(tmp_path / name), "--out", str(tmp_path / "out")]
    result = run(app, ["posterior", *common, "--sigma", "0.5", "--components", "0", "--draws", "0"])
    assert result.exit_code == 0, result.output
    (folder,) = (path.parent for path in (tmp_path / "out").glob("*/arrays.npz"))
    with np.load(folder / "arrays.npz") as arrays:
        assert np.array_equal(arrays["noisy"], values)
    seen = {}
    kept = restored_folder.restore_into

    def restore_into(out, model, given, *words, **options):
        seen["y"] = given[0].y
        return kept(out, model, given, *words, **options)

    monkeypatch.setattr(restored_folder, "restore_into", restore_into)
    common[-1] = str(tmp_path / "restored")
    words = ["--operator=random:0", "--noise=0.1", "--covariance=diagonal", "--draws=1"]
    result = run(app, ["restore", *common, *words, "--steps=2"])
    assert result.exit_code == 0, result.output
    assert np.array_equal(seen["y"][0].numpy(), values)
    assert json.loads((tmp_path / "restored" / "restored.json").read_text())["finished"]
