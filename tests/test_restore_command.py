"""`mmdgs restore`: what it writes, that it goes on where it was stopped, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from toy_models import many_level_model, stand_in_model
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.data import load_samples, midpoints
from mmdgs.errors import UsageError
from mmdgs.generation import image_posterior, restoration, restored
from mmdgs.generation.restoration import RestorationSettings
from mmdgs.generation.restored import restore_into, simulated
from mmdgs.models import Model, load
from mmdgs.models.calibration import estimator_name
from mmdgs.models.fits import FitStore
from mmdgs.noise import LevelTable
from mmdgs.operators import Blur, Box, Downsample, Grayscale, Mask, Matrix, linear
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


@pytest.mark.parametrize("command", ["restore", "posterior", "train", "judge", "plane"])
def test_a_folder_for_results_is_not_named_as_a_file(command: str, tmp_path: Path) -> None:
    given = {
        "restore": ["cifar10", "x.png", "--operator", "gray", "--noise", "0.1"],
        "posterior": ["cifar10", "x.png", "--sigma", "0.3"],
        "train": ["--data", "mog", "--model", "mlp", "--sigma", "0.5"],
        "judge": ["draws.npz"],
        "plane": ["mog", "--at", "0,0"],
    }[command]
    result = run(cli.app, [command, *given, "--out", str(tmp_path / "page.html")])
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "the output is a folder, and page.html is the name of a file" in " ".join(result.output.split())


def test_no_warnings_of_torch_come_through(folder: Path, tmp_path: Path) -> None:
    # A picture, whose pixels cannot be written, and a denoiser that is differentiated in forward mode.
    Image.new("RGB", (8, 8), (90, 120, 30)).save(tmp_path / "one.png")
    restoring = [
        "restore",
        str(folder / "model"),
        str(tmp_path / "one.png"),
        "--operator",
        "box:4",
        "--noise",
        "0.1",
        "--covariance",
        "diagonal",
    ]
    seeing = ["posterior", str(folder / "model"), str(tmp_path / "one.png"), "--sigma", "0.5", "--components", "1"]
    for name, words in {"r": [*restoring, "--draws", "1", "--steps", "2"], "p": [*seeing, "--draws", "1"]}.items():
        command = [sys.executable, "-W", "always", "-m", "mmdgs", *words, "--out", str(tmp_path / name)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        assert "Warning" not in made.stderr


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


def made(out: Path) -> tuple[dict[str, Any], numpy.ndarray]:
    """The settings that a run recorded, and its draws."""
    with numpy.load(out / "draws.npz") as found:
        return json.loads((out / "restored.json").read_text())["settings"], found["draws"]


OPTIONS: dict[str, tuple[str, ...]] = {
    "chains": ("bridge", "mirrored"),
    "covariance": ("krylov", "rademacher"),
    "steps": ("4",),
    "draws": ("2",),
    "seed": ("1",),
    "precision": ("bf16",),
    "noise": ("0.2", "estimate"),
    "operator": ("box:2",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_every_option_is_what_runs_and_what_is_recorded(folder: Path, tmp_path: Path, name: str, value: str) -> None:
    images = "clean.npz" if name == "operator" or value == "estimate" else "small.npz"
    plain = {"operator": "random:0.1"} if images == "clean.npz" else {}
    for out, given in ((tmp_path / "plain", {}), (tmp_path / "other", {name: value})):
        result = run(cli.app, command(folder, out, images=images, **{**plain, **given}))
        assert result.exit_code == 0, result.output
    (_, before), (settings, draws) = made(tmp_path / "plain"), made(tmp_path / "other")
    assert str(settings[name]) == value
    assert draws.shape != before.shape or abs(draws - before).max() > 1e-4


def test_chains_of_the_command_are_those_of_the_call(folder: Path, tmp_path: Path) -> None:
    model, y = load(folder / "model"), midpoints(load_samples(folder / "small.npz").images)
    for chains in restoration.CHAINS:
        assert run(cli.app, command(folder, tmp_path / chains, "--chains", chains, images="small.npz")).exit_code == 0
        settings, draws = made(tmp_path / chains)
        assert settings["chains"] == chains
        by_call = restoration.restore(
            *(model, y, Downsample(SHAPE, 2)), noise=0.1, chains=chains, covariance="diagonal", steps=3, draws=3
        )
        numpy.testing.assert_allclose(draws, by_call.draws.numpy(), atol=1e-4)  # in batches of the same size or not


@pytest.mark.parametrize("at_a_time", [1, 2, 9])
def test_another_batch_size_changes_numbers_by_rounding_alone(folder: Path, tmp_path: Path, at_a_time: int) -> None:
    for out, size in (("one", "3"), ("other", str(at_a_time))):
        words = command(folder, tmp_path / out, "--batch-size", size, images="small.npz")
        assert run(cli.app, words).exit_code == 0
    numpy.testing.assert_allclose(made(tmp_path / "one")[1], made(tmp_path / "other")[1], atol=1e-4)


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
    settings = RestorationSettings(noise=0.1, covariance="diagonal", steps=3, draws=3)
    restore_into(tmp_path / "out", model, y, operator, settings, batch_size=at_a_time)
    assert shown == [unit]


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    one_by_one = ("--simulate", "--batch-size", "3")
    assert run(cli.app, command(folder, whole, *one_by_one)).exit_code == 0
    real, calls = restored.restore_by, []

    def interrupted(*args: object, **given: object) -> object:
        calls.append(given["first"])
        if given["first"] == 1 and len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(restored, "restore_by", interrupted)
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


def fit_beside(model: Path, kind: str, factor: float) -> None:
    """A fit of a kind in a model's folder: a spectrum, one variance, or the calibration of three signs."""
    found = load(model)
    values = {"spectral": torch.full(found.shape, factor), "isotropic": torch.tensor(factor)}
    value = values.get(kind, torch.tensor([1e-4, factor]))
    table = LevelTable.of(dict.fromkeys(found.levels, value))
    FitStore(found, kind).write(model / f"{kind}.safetensors", {"images": 2}, table)


def calibrate_beside(model: Path, factor: float) -> None:
    """Calibrations of the diagonal by three probes, as in restore and sample, and by ten, as in posterior."""
    found = load(model)
    for probes in (3, 10):
        own = found.posterior("diagonal", probes=probes, calibrated=False)
        fit_beside(model, f"calibration-{estimator_name(own, found)}", factor)


def another_level(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["sigmas"][0] *= 1.5
    (model / "config.json").write_text(json.dumps(config))


def another_mask(root: Path) -> None:
    mask = numpy.zeros((8, 8), dtype=numpy.uint8)
    mask[:, 3:] = 255
    Image.fromarray(mask).save(root / "mask.png")


CHANGES: dict[str, tuple[str, dict[str, str], Callable[[Path], None]]] = {
    "the pixels of the mask": ("restore", {}, another_mask),
    "the levels in the configuration": (
        "restore sample posterior",
        {},
        lambda root: another_level(root / "model"),
    ),
    "the spectrum": (
        "restore sample",
        {"covariance": "spectral"},
        lambda root: fit_beside(root / "model", "spectral", 0.3),
    ),
    "the one variance": (
        "restore sample",
        {"covariance": "isotropic"},
        lambda root: fit_beside(root / "model", "isotropic", 0.3),
    ),
    "the calibration": ("restore sample posterior", {}, lambda root: calibrate_beside(root / "model", 0.3)),
    "the images": (
        "restore posterior",
        {},
        lambda root: numpy.savez(root / "clean.npz", x=numpy.full((3, 1, 8, 8), 7, numpy.uint8)),
    ),
}
"""What is changed between two runs, in which commands, and how."""


@pytest.mark.parametrize(("what", "kind"), [(what, kind) for what in CHANGES for kind in CHANGES[what][0].split()])
def test_a_run_does_not_go_on_from_other_inputs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kind: str
) -> None:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    _, given, change = CHANGES[what]
    root, out = tmp_path / "root", tmp_path / "out"
    shutil.copytree(folder, root)
    for name in ("spectral", "isotropic"):
        fit_beside(root / "model", name, 0.1)
    calibrate_beside(root / "model", 0.1)
    words = {
        "restore": command(root, out, operator=str(root / "mask.png"), **given),
        "sample": [
            *("sample", str(root / "model"), "--out", str(out), "-n", "2", "--sampler", "gibbs-down", "-q", "--sweeps"),
            *("1", "--covariance", given.get("covariance", "diagonal")),
        ],
        "posterior": [
            *("posterior", str(root / "model"), str(root / "clean.npz"), "--out", str(out), "--sigma", "0.2", "-q"),
            *("--components", "0", "--draws", "0"),
        ],
    }[kind]
    assert run(cli.app, words).exit_code == 0
    kept = tmp_path / "kept"
    shutil.copytree(root, kept)
    record = next(out.glob("*.json"))
    before = record.read_bytes()
    change(root)
    result = run(cli.app, [*words, "--resume"])
    assert result.exit_code == 2, result.output
    assert "begun with other settings" in result.output
    assert record.read_bytes() == before
    shutil.rmtree(root)
    kept.rename(root)
    result = run(cli.app, [*words, "--resume"])  # as it was: nothing to be done
    assert result.exit_code == 0, result.output
    assert record.read_bytes() == before


def test_a_call_does_not_go_on_with_other_measurements_or_another_operator(folder: Path, tmp_path: Path) -> None:
    model, out = load(folder / "model"), tmp_path / "out"
    y = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    settings = RestorationSettings(noise=0.1, covariance="diagonal", steps=3, draws=2)
    halves, thirds = (
        linear(function, SHAPE) for function in (lambda x: x[..., ::2, ::2] / 2, lambda x: x[..., ::2, ::2] / 3)
    )
    restore_into(out, model, y, halves, settings, progress=None)
    with pytest.raises(UsageError, match=r"begun with other settings \(inputs.y was"):
        restore_into(out, model, y + 0.1, halves, settings, resume=True, progress=None)
    with pytest.raises(UsageError, match=r"begun with other settings \(inputs.operator"):
        restore_into(out, model, y, thirds, settings, resume=True, progress=None)
    restore_into(out, model, y, halves, settings, resume=True, progress=None)


def nan_draws(work: Path) -> None:
    numpy.save(work / "000000.npy", numpy.full_like(numpy.load(work / "000000.npy"), numpy.nan))


def other_draws(work: Path) -> None:
    numpy.save(work / "000000.npy", numpy.zeros((2, *SHAPE), numpy.float32))


def zipped(work: Path) -> None:
    with (work / "000000.npy").open("wb") as stream:
        numpy.savez(stream, numpy.zeros((3, *SHAPE), numpy.float32))


def named_oddly(work: Path) -> None:
    for name in ("0abc", "99999999999999999999", "0000000"):
        shutil.copy(work / "000000.npy", work / f"{name}.npy")


def bytes_cut(work: Path) -> None:
    (work / "000000.npy").write_bytes((work / "000000.npy").read_bytes()[:-3])


@pytest.mark.parametrize("damage", [nan_draws, other_draws, zipped, named_oddly, bytes_cut])
def test_damaged_parts_are_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    words = ("--batch-size", "3")
    assert run(cli.app, command(folder, whole, *words, images="small.npz")).exit_code == 0
    real, calls = restored.restore_by, []

    def interrupted(*args: Any, **given: Any) -> Any:
        calls.append(given["first"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **given)

    monkeypatch.setattr(restored, "restore_by", interrupted)
    assert run(cli.app, command(folder, out, *words, images="small.npz")).exit_code == 130
    damage(out / ".parts")
    result = run(cli.app, command(folder, out, *words, "--resume", images="small.npz"))
    assert result.exit_code == 0, result.output
    numpy.testing.assert_array_equal(made(whole)[1], made(out)[1])


def test_files_have_the_names_of_their_images_and_the_noise_is_told(folder: Path, tmp_path: Path) -> None:
    names = ["b.one", "\u4e00" * 82, "a/x", "b/x", "b/X"]
    generator = torch.Generator().manual_seed(0)
    for name in names:
        file = tmp_path / "photos" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        noisy = 0.5 + 0.1 * torch.randn(8, 8, generator=generator)
        Image.fromarray((255 * noisy.clamp(0, 1)).byte().numpy()).save(file)
    (tmp_path / "model").symlink_to(folder / "model")
    words = command(tmp_path, tmp_path / "out", images="photos", noise="estimate", operator="blur:0.5")
    result = run(cli.app, [*words, "-n", "5"])
    assert result.exit_code == 0, result.output
    expected = ["a-x", "b-X", "b-x-2", "b.one", "\u4e00" * 40]
    for kind in ("mean", "std"):
        assert sorted(file.stem for file in (tmp_path / "out" / kind).iterdir()) == sorted(expected)
    images = json.loads((tmp_path / "out" / "restored.json").read_text())["images"]
    assert sorted(image["name"] for image in images) == sorted(expected)
    assert len({image["noise"] for image in images}) == 5
    for image in images:
        assert 0.03 < image["noise"] < 0.3
        assert f"{image['noise']:.3g} ({image['name']})" in result.output
    single = command(tmp_path, tmp_path / "single", images="photos/b.one.png", operator="blur:0.5")
    result = run(cli.app, single)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "single" / "mean" / "b.one.png").is_file()
    record = json.loads((tmp_path / "single" / "restored.json").read_text())
    assert record["images"] == [{"name": "b.one", "noise": pytest.approx(0.1)}]


def test_a_noise_for_values_up_to_255_is_refused(folder: Path, tmp_path: Path) -> None:
    words = [str(folder / "model"), str(folder / "clean.npz"), "--out", str(tmp_path / "out"), "-q"]
    for more in (["restore", *words, "--operator", "box:2", "--noise", "25"], ["posterior", *words, "--sigma", "25"]):
        for simulate in ([], ["--simulate"]):
            result = run(cli.app, [*more, *simulate])
            assert result.exit_code == 2
            assert "values are in [0, 1]; did you mean 25/255 = 0.098?" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
    model = load(folder / "model")
    with pytest.raises(UsageError, match=r"did you mean 10/255 = 0.039\?"):
        restoration.restore(model, torch.zeros(2, *SHAPE), Box(SHAPE, 2), noise=torch.tensor([0.1, 10.0]))
    with pytest.raises(UsageError, match=r"did you mean 5/255 = 0.02\?"):
        image_posterior(model, torch.zeros(SHAPE), 5)
    sums = Matrix(torch.ones(4, 64), SHAPE)  # of 64 pixels: measurements up to 64
    settings: dict[str, Any] = {"covariance": "diagonal", "steps": 2, "draws": 1, "progress": None}
    restoration.restore(model, torch.full((1, 4), 30.0), sums, noise=6.0, **settings)


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
        restore_into(tmp_path / "out", model, y, Box(SHAPE, 2), RestorationSettings(noise=0.1))
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
