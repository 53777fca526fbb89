"""`mmdgs restore`: what it writes, that it goes on where it was stopped, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from toy_models import many_level_model, stand_in_model
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.generation import restoration, restored
from mmdgs.generation.restored import restore_into, simulated
from mmdgs.models import Model, load
from mmdgs.operators import Blur, Box, Downsample, Grayscale, Mask
from mmdgs.operators.named import parse_operator
from mmdgs.runtime import progress_bar

run = CliRunner().invoke
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8x8 images, and images for it."""
    root = tmp_path_factory.mktemp("restore")
    many_level_model().save_pretrained(root / "model")
    pixels = torch.randint(0, 256, (3, 8, 8, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    numpy.savez(root / "clean.npz", arr_0=pixels.numpy())
    numpy.savez(root / "small.npz", arr_0=pixels[:, :4, :4].numpy())
    mask = numpy.zeros((8, 8), dtype=numpy.uint8)
    mask[2:] = 255
    Image.fromarray(mask).save(root / "mask.png")
    Image.fromarray(mask[:4]).save(root / "wrong.png")
    return root


def command(folder: Path, out: Path, *more: str, images: str = "clean.npz", **given: str) -> list[str]:
    settings = {"operator": "sr:2", "noise": "0.1", "draws": "3", "steps": "3", "covariance": "diagonal", **given}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return ["restore", str(folder / "model"), str(folder / images), "--out", str(out), *options, "-q", *more]


def test_it_writes_draws_means_uncertainties_and_a_picture(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(cli.app, command(folder, out, "--simulate"))
    assert result.exit_code == 0, result.output
    assert "spread over error" in result.output
    with numpy.load(out / "draws.npz") as found:
        draws = found["draws"]
        assert draws.shape == (3, 3, *SHAPE)
        numpy.testing.assert_allclose(found["mean"], draws.mean(0), rtol=1e-5, atol=1e-5)
        numpy.testing.assert_allclose(found["std"], draws.std(0, ddof=1), rtol=1e-4, atol=1e-5)
    assert sorted(file.name for file in out.iterdir() if not file.name.startswith(".")) == [
        *("draws.npz", "mean", "restored.json", "restored.png", "std")
    ]
    assert len(list((out / "mean").iterdir())) == len(list((out / "std").iterdir())) == 3
    record = json.loads((out / "restored.json").read_text())
    assert record["finished"] is True
    assert record["cost"] == {"forwards": 3, "products": 9}
    assert {"psnr_draw", "psnr_mean", "calibration", "coverage_90", "crps"} <= record["scores"].keys()
    with Image.open(out / "restored.png") as picture:
        columns = 1 + 1 + 3 + 1 + 1  # measurement, mean, draws, uncertainty, truth
        assert picture.size == (3 * (columns * 10 + 2), 3 * (3 * 10 + 2) + restored.HEADER)
    again = run(cli.app, command(folder, out, "--simulate"))
    assert again.exit_code == 2
    assert "use --overwrite" in again.output


def test_measurements_as_they_are(folder: Path, tmp_path: Path) -> None:
    result = run(cli.app, command(folder, tmp_path / "out", "-n", "2", images="small.npz"))
    assert result.exit_code == 0, result.output
    with numpy.load(tmp_path / "out" / "draws.npz") as found:
        assert found["draws"].shape == (3, 2, *SHAPE)
    assert json.loads((tmp_path / "out" / "restored.json").read_text())["scores"] == {}


def test_what_is_set_of_the_covariance(folder: Path, tmp_path: Path) -> None:
    stand_in_model(tmp_path, SHAPE).save_pretrained(tmp_path / "model")
    (tmp_path / "spectral.safetensors").rename(tmp_path / "model" / "spectral.safetensors")
    (tmp_path / "small.npz").write_bytes((folder / "small.npz").read_bytes())
    costs, draws = [], []
    for number, more in enumerate(([], ["--products", "1"], ["--products", "1", "--symmetric"])):
        out = tmp_path / str(number)
        result = run(cli.app, command(tmp_path, out, *more, images="small.npz", covariance="low-rank"))
        assert result.exit_code == 0, result.output
        costs.append(json.loads((out / "restored.json").read_text())["cost"]["products"])
        with numpy.load(out / "draws.npz") as found:
            draws.append(found["draws"])
    assert costs == [4 * costs[2], 2 * costs[2], costs[2]]
    assert costs[2] == 3  # one at each of three levels
    assert not numpy.allclose(draws[1], draws[2])
    other = run(cli.app, command(tmp_path, tmp_path / "1", "--resume", images="small.npz", covariance="low-rank"))
    assert other.exit_code == 2
    assert "products" in other.output


@pytest.mark.parametrize(("at_a_time", "unit"), [(9, "chain-step"), (3, "image")])
def test_one_bar_tells_how_far_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int, unit: str
) -> None:
    shown: list[str] = []

    def noted(total: int, label: str | None, unit: str) -> Any:
        shown.extend([unit] if label else [])
        return progress_bar(total, None)

    for module in (restoration, restored):
        monkeypatch.setattr(module, "progress_bar", noted)
    y = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    model, operator = load(folder / "model"), Downsample(SHAPE, 2)
    restore_into(
        tmp_path / "out", model, y, operator, noise=0.1, covariance="diagonal", steps=3, draws=3, batch_size=at_a_time
    )
    assert shown == [unit]


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    one_by_one = ("--simulate", "--batch-size", "3")
    assert run(cli.app, command(folder, whole, *one_by_one)).exit_code == 0
    real, calls = restored.restore, []

    def interrupted(*args: object, **given: object) -> object:
        calls.append(given["first"])
        if given["first"] == 1 and len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(restored, "restore", interrupted)
    first = run(cli.app, command(folder, stopped, *one_by_one))
    assert first.exit_code == 130
    assert "--resume" in first.output
    other = run(cli.app, command(folder, stopped, *one_by_one, "--resume", noise="0.2"))
    assert other.exit_code == 2
    assert "noise was 0.1, now 0.2" in other.output
    other = run(cli.app, command(folder, stopped, *one_by_one, "--resume", "--chains", "mirrored"))
    assert other.exit_code != 0
    assert "chains" in other.output
    second = run(cli.app, command(folder, stopped, *one_by_one, "--resume"))
    assert second.exit_code == 0, second.output
    assert calls == [0, 1, 1, 2]
    with numpy.load(whole / "draws.npz") as a, numpy.load(stopped / "draws.npz") as b:
        numpy.testing.assert_array_equal(a["draws"], b["draws"])


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        ({"operator": "sr:3"}, (), "divides 8 and 8, got 3"),
        ({"operator": "zoom:3"}, (), "unknown operator 'zoom:3'"),
        ({"operator": "bur:1"}, (), "did you mean 'blur'"),
        ({"operator": "sr"}, (), "an example is sr:4"),
        ({"operator": "box:9"}, (), "a box of 9 x 9 does not fit"),
        ({"operator": "wrong.png"}, (), "is 4 x 8 pixels, and the model's images are 8 x 8"),
        ({"noise": "0"}, ("--simulate",), "must be positive and finite, got 0"),
        ({"noise": "-1"}, ("--simulate",), "must be positive and finite, got -1"),
        ({"noise": "much"}, (), "--noise must be a number, or estimate, got 'much'"),
        ({"noise": "estimate"}, ("--simulate",), "give a number, not estimate"),
        ({}, (), "are 1 x 8 x 8, and measurements by this operator are 1 x 4 x 4; clean images"),
        ({"covariance": "spectral"}, ("--simulate",), "spectral"),
        ({"covariance": "spectra"}, ("--simulate",), "did you mean 'spectral'"),
        ({"products": "2"}, ("--simulate",), "the covariance 'diagonal' takes no products"),
    ],
)
def test_what_is_refused_in_one_line(
    folder: Path, tmp_path: Path, given: dict[str, str], more: tuple[str, ...], says: str
) -> None:
    if given.get("operator", "").endswith(".png"):
        given = {"operator": str(folder / given["operator"])}
    result = run(cli.app, command(folder, tmp_path / "out", *more, **given))
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert not (tmp_path / "out" / "restored.json").exists()


def test_operators_by_name(folder: Path) -> None:
    shape = (3, 8, 8)
    assert isinstance(parse_operator("sr:4", shape), Downsample)
    assert isinstance(parse_operator("gray", shape), Grayscale)
    assert isinstance(parse_operator("motion:3", shape), Blur)
    assert isinstance(parse_operator("blur:1.5", shape), Blur)
    assert isinstance(parse_operator("box:4", shape), Box)
    random = parse_operator("random:0.75", shape, seed=3)
    assert isinstance(random, Mask)
    assert random.keep.tensor.sum() == 3 * 16
    assert torch.equal(random.keep.tensor, parse_operator("random:0.75", shape, seed=3).keep.tensor)  # type: ignore[attr-defined]
    mask = parse_operator(str(folder / "mask.png"), shape)
    assert isinstance(mask, Mask)
    assert mask.keep.tensor[:, 2:].all()
    assert not mask.keep.tensor[:, :2].any()


def test_nothing_is_written_where_measurements_are_not_finite(folder: Path, tmp_path: Path) -> None:
    model: Model = load(folder / "model")
    y = torch.full((1, *SHAPE), float("nan"))
    with pytest.raises(UsageError, match="not finite in row 0"):
        restore_into(tmp_path / "out", model, y, Box(SHAPE, 2), noise=0.1)
    assert not (tmp_path / "out").exists()


def test_simulated_noise_has_its_size_and_does_not_depend_on_the_number_of_images() -> None:
    truth, operator = torch.zeros(4, 1, 32, 32), Downsample((1, 32, 32), 2)
    y = simulated(truth, operator, 0.3, seed=1)
    assert y.std().item() == pytest.approx(0.3, rel=0.1)
    assert torch.equal(simulated(truth[:2], operator, 0.3, seed=1), y[:2])


def test_a_warning_where_the_model_was_trained_on_the_images_it_is_judged_by(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "faces").mkdir()
    for i, pixels in enumerate(numpy.load(folder / "clean.npz")["arr_0"]):
        Image.fromarray(pixels[..., 0]).save(tmp_path / "faces" / f"{i}.png")
    config = tmp_path / "model" / "config.json"
    trained_on = f"{tmp_path / 'faces'}:test"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"trained_on": trained_on}))
    warning = f"was trained on {trained_on}: scores and intervals from these images do not hold for others"
    for images, warned in (("faces:test", True), ("faces:train", False)):
        result = run(cli.app, command(tmp_path, tmp_path / images, "--simulate", images=images))
        assert result.exit_code == 0, result.output
        assert (warning in result.output) == warned
