"""`mmdgs restore`: what it writes, that it goes on where it was stopped, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import Result
from PIL import Image
from toy_models import many_level_model, stand_in_model
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.covariances import Diagonal
from mmdgs.data import load_samples, midpoints
from mmdgs.errors import UsageError
from mmdgs.models import load
from mmdgs.models.estimators import estimator_name
from mmdgs.models.fits import FitStore
from mmdgs.noise import LevelTable
from mmdgs.operators import Blur, Box, Downsample, Grayscale, Mask, Matrix, linear
from mmdgs.operators.named import parse_operator
from mmdgs.restoration import draws as restoration, folder as restored
from mmdgs.restoration.draws import Restoration, restore
from mmdgs.restoration.folder import Measurements, restore_into, simulated
from mmdgs.restoration.settings import CHAINS, RestorationSettings
from mmdgs.uncertainty.image import image_posterior

SHAPE = (1, 8, 8)


def run(words: list[str]) -> Result:
    return CliRunner().invoke(cli.app, words)


def write_mask(file: Path, measured: tuple[slice, ...], height: int = 8) -> None:
    mask = numpy.zeros((height, 8), dtype=numpy.uint8)
    mask[measured] = 255
    Image.fromarray(mask).save(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8x8 images, and images for it."""
    root = tmp_path_factory.mktemp("restore")
    many_level_model().save_pretrained(root / "model")
    pixels = numpy.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=numpy.uint8)
    numpy.savez(root / "clean.npz", arr_0=pixels)
    numpy.savez(root / "small.npz", arr_0=pixels[:, :4, :4])
    write_mask(root / "mask.png", numpy.s_[2:, :])
    write_mask(root / "wrong.png", numpy.s_[2:, :], height=4)
    return root


def command(
    folder: Path, out: Path, *more: str, images: str = "clean.npz", **options: str
) -> list[str]:
    settings = {"operator": "sr:2", "noise": "0.1", "draws": "3", "steps": "3"}
    settings |= {"covariance": "diagonal", **options}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    paths = [str(folder / "model"), str(folder / images), "--out", str(out)]
    return ["restore", *paths, *words, "-q", *more]


def record_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "restored.json").read_text())


def draws_of(out: Path) -> numpy.ndarray:
    with numpy.load(out / "draws.npz") as arrays:
        return arrays["draws"]


def test_it_writes_draws_means_uncertainties_and_a_picture(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(command(folder, out, "--simulate"))
    assert result.exit_code == 0, result.output
    assert "spread over error" in result.output
    with numpy.load(out / "draws.npz") as arrays:
        draws = arrays["draws"]
        assert draws.shape == (3, 3, *SHAPE)
        numpy.testing.assert_allclose(arrays["mean"], draws.mean(0), rtol=1e-5, atol=1e-5)
        numpy.testing.assert_allclose(arrays["std"], draws.std(0, ddof=1), rtol=1e-4, atol=1e-5)
    names = {file.name for file in out.iterdir() if not file.name.startswith(".")}
    assert names == {"draws.npz", "mean", "restored.json", "restored.png", "std"}
    assert len(list((out / "mean").iterdir())) == len(list((out / "std").iterdir())) == 3
    record = record_of(out)
    assert record["finished"] is True
    assert record["cost"] == {"forwards": 3, "products": 9}
    scores = {"psnr_draw", "psnr_mean", "calibration", "coverage_90", "crps"}
    assert scores <= record["scores"].keys()
    with Image.open(out / "restored.png") as picture:
        columns = 1 + 1 + 3 + 1 + 1  # measurement, mean, draws, uncertainty, truth
        assert picture.size == (3 * (columns * 10 + 2), 3 * (3 * 10 + 2) + restored.HEADER)
    again = run(command(folder, out, "--simulate"))
    assert (again.exit_code, "--overwrite" in again.output) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        "restore cifar10 x.png --operator gray --noise 0.1",
        "posterior cifar10 x.png --sigma 0.3",
        "train --data mog --model mlp --sigma 0.5",
        "judge draws.npz",
        "plane mog --at 0,0",
    ],
)
def test_a_folder_for_results_is_not_named_as_a_file(words: str, tmp_path: Path) -> None:
    result = run([*words.split(), "--out", str(tmp_path / "page.html")])
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "page.html is the name of a file" in " ".join(result.output.split())


def test_no_warnings_of_torch_come_through(folder: Path, tmp_path: Path) -> None:
    """A picture, whose pixels cannot be written, and a denoiser differentiated in forward mode."""
    image, model = tmp_path / "one.png", folder / "model"
    Image.new("RGB", (8, 8), (90, 120, 30)).save(image)
    torch.set_warn_always(True)  # also of what an earlier test was warned; here it is an error
    try:
        for number, words in enumerate(
            (
                f"restore {model} {image} --operator box:4 --noise 0.1 --covariance diagonal "
                "--steps 2",
                f"posterior {model} {image} --sigma 0.5 --components 1",
            )
        ):
            out = tmp_path / str(number)
            result = run([*words.split(), "--draws", "1", "--out", str(out)])
            assert result.exit_code == 0, result.output
    finally:
        torch.set_warn_always(False)


def test_options_of_the_covariance(folder: Path, tmp_path: Path) -> None:
    stand_in_model(tmp_path, SHAPE).save_pretrained(tmp_path / "model")
    (tmp_path / "spectral.safetensors").rename(tmp_path / "model" / "spectral.safetensors")
    (tmp_path / "small.npz").write_bytes((folder / "small.npz").read_bytes())
    costs, draws = [], []
    same = {"images": "small.npz", "covariance": "low-rank"}
    for number, more in enumerate(([], ["--products", "1"], ["--products", "1", "--symmetric"])):
        out = tmp_path / str(number)
        result = run(command(tmp_path, out, *more, **same))
        assert result.exit_code == 0, result.output
        costs.append(record_of(out)["cost"]["products"])
        draws.append(draws_of(out))
    assert costs == [12, 6, 3]  # symmetric: one at each of three levels
    assert not numpy.allclose(draws[1], draws[2])
    other = run(command(tmp_path, tmp_path / "1", "--resume", **same))
    assert (other.exit_code, "products" in other.output) == (2, True)


OPTIONS = {
    "chains": ("bridge", "mirrored"),
    "covariance": ("krylov", "rademacher"),
    "steps": ("4",),
    "draws": ("2",),
    "seed": ("1",),
    "precision": ("bf16",),
    "noise": ("0.2", "estimate"),
    "operator": ("box:2",),
}


def test_every_option_is_what_runs_and_what_is_recorded(folder: Path, tmp_path: Path) -> None:
    plain = {"operator": "random:0.1"}
    assert run(command(folder, tmp_path / "plain", **plain)).exit_code == 0
    before = draws_of(tmp_path / "plain")
    for name, value in ((name, value) for name, values in OPTIONS.items() for value in values):
        out = tmp_path / f"{name} {value}"
        result = run(command(folder, out, **{**plain, name: value}))
        assert result.exit_code == 0, result.output
        recorded, draws = record_of(out)["settings"][name], draws_of(out)
        assert str(recorded["name"] if name == "covariance" else recorded) == value
        assert draws.shape != before.shape or abs(draws - before).max() > 1e-4, name


def test_particles_are_other_draws_at_so_many_times_the_cost(folder: Path, tmp_path: Path) -> None:
    costs, draws = [], []
    for particles in ("1", "3"):
        out = tmp_path / particles
        options = {"operator": "random:0.1", "covariance": "diagonal", "chains": "bridge"}
        result = run(command(folder, out, **options, particles=particles))
        assert result.exit_code == 0, result.output
        assert record_of(out)["settings"]["particles"] == int(particles)
        costs.append(record_of(out)["cost"]["forwards"])
        draws.append(draws_of(out))
    assert costs[1] == 3 * costs[0]
    assert abs(draws[1] - draws[0]).max() > 1e-4
    # The evidence and the shares of the particles are in the record, as the call gives them.
    assert "log_evidence" not in record_of(tmp_path / "1")["images"][0]
    model, y = load(folder / "model"), midpoints(load_samples(folder / "clean.npz").images)
    settings = record_of(tmp_path / "3")["settings"]
    names = ("chains", "steps", "draws", "particles", "seed")
    options = {name: settings[name] for name in names} | {"noise": settings["noise"]}
    operator = parse_operator("random:0.1", model.shape, seed=settings["seed"])
    drawn = restore(model, y, operator, covariance="diagonal", progress=None, **options)
    for i, image in enumerate(record_of(tmp_path / "3")["images"]):
        log, error = (values[i].item() for values in drawn.log_evidence())
        assert image["log_evidence"] == pytest.approx(log, abs=0.05)
        assert image["log_evidence_error"] == pytest.approx(error, abs=0.05)
        shares = drawn.info["effective"][:, i].mean(0)
        assert image["least_effective"] == pytest.approx(shares.min().item(), abs=0.01)


def test_the_command_is_the_call_in_batches_of_any_size(folder: Path, tmp_path: Path) -> None:
    model, y = load(folder / "model"), midpoints(load_samples(folder / "small.npz").images)
    operator = Downsample(SHAPE, 2)
    options: dict[str, Any] = {"noise": 0.1, "covariance": "diagonal", "steps": 3, "draws": 3}
    for chains, size in zip(CHAINS, (1, 3, 9), strict=True):
        more = ("--chains", chains, "--batch-size", str(size))
        assert run(command(folder, tmp_path / chains, *more, images="small.npz")).exit_code == 0
        by_call = restoration.restore(model, y, operator, chains=chains, **options)
        numpy.testing.assert_allclose(draws_of(tmp_path / chains), by_call.draws, atol=1e-4)
        assert record_of(tmp_path / chains)["scores"] == {}  # measurements as they are


def test_what_is_simulated_has_its_own_seed(folder: Path, tmp_path: Path) -> None:
    """The seed of the command is that of the measurements' noise, and of the draws."""
    model, truth = load(folder / "model"), midpoints(load_samples(folder / "clean.npz").images)
    operator = Downsample(SHAPE, 2)
    y = simulated(truth, operator, 0.1, seed=5)
    options: dict[str, Any] = {"noise": 0.1, "covariance": "diagonal", "steps": 3, "draws": 3}
    expected = restoration.restore(model, y, operator, seed=5, **options).draws
    assert run(command(folder, tmp_path / "out", "--simulate", seed="5")).exit_code == 0
    numpy.testing.assert_allclose(draws_of(tmp_path / "out"), expected, atol=1e-4)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first measurement of each part that is drawn; the second of the first run is Ctrl-C."""
    draw, parts = Restoration.draws, []

    def draws(work: Restoration, start: int, stop: int, **options: Any) -> Any:
        parts.append(start)
        if parts == [0, 1]:
            raise KeyboardInterrupt
        return draw(work, start, stop, **options)

    monkeypatch.setattr(Restoration, "draws", draws)
    return parts


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, stopped: list[int]) -> None:
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    one_by_one = ("--simulate", "--batch-size", "3")
    first = run(command(folder, begun, *one_by_one))
    assert (first.exit_code, "--resume" in first.output) == (130, True)
    for name, value in (("noise", "0.2"), ("chains", "mirrored")):
        other = run(command(folder, begun, *one_by_one, "--resume", **{name: value}))
        assert (other.exit_code, name in other.output) == (2, True)
    second = run(command(folder, begun, *one_by_one, "--resume"))
    assert second.exit_code == 0, second.output
    assert stopped == [0, 1, 1, 2]
    assert run(command(folder, whole, *one_by_one)).exit_code == 0
    numpy.testing.assert_array_equal(draws_of(whole), draws_of(begun))


def fit_beside(model: Path, kind: str, value: Any) -> None:
    """A fit of a kind in a model's folder, the same at all levels."""
    network = load(model)
    table = LevelTable.of(dict.fromkeys(network.levels, torch.as_tensor(value)))
    FitStore(network, kind).write(model / f"{kind}.safetensors", {"images": 2}, table)


def calibrate_beside(root: Path, factor: float) -> None:
    """Calibrations of the diagonal by three probes, as in restore and sample, and by ten, as in
    posterior.
    """
    network = load(root / "model")
    for probes in (3, 10):
        name = estimator_name(network.posterior(Diagonal(probes, calibrated=False)), network)
        fit_beside(root / "model", f"calibration-{name}", [1e-4, factor])


def another_level(root: Path) -> None:
    config = json.loads((root / "model" / "config.json").read_text())
    config["sigmas"][0] *= 1.5
    (root / "model" / "config.json").write_text(json.dumps(config))


def other_images(root: Path) -> None:
    numpy.savez(root / "clean.npz", x=numpy.full((3, 1, 8, 8), 7, numpy.uint8))


CHANGES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "mask": ("restore", "diagonal", lambda root: write_mask(root / "mask.png", numpy.s_[:, 3:])),
    "levels": ("restore sample posterior", "diagonal", another_level),
    "spectrum": (
        "restore sample",
        "spectral",
        lambda root: fit_beside(root / "model", "spectral", torch.full(SHAPE, 0.3)),
    ),
    "variance": (
        "restore sample",
        "isotropic",
        lambda root: fit_beside(root / "model", "isotropic", 0.3),
    ),
    "calibration": (
        "restore sample posterior",
        "diagonal",
        lambda root: calibrate_beside(root, 0.3),
    ),
    "images": ("restore posterior", "diagonal", other_images),
}
"""What is changed between two runs, in which commands, with which covariance, and how."""


@pytest.mark.parametrize(
    ("what", "kind"), [(what, kind) for what in CHANGES for kind in CHANGES[what][0].split()]
)
def test_a_run_does_not_go_on_from_other_inputs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kind: str
) -> None:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    _, covariance, change = CHANGES[what]
    root, kept, out = tmp_path / "root", tmp_path / "kept", tmp_path / "out"
    shutil.copytree(folder, root)
    fit_beside(root / "model", "spectral", torch.full(SHAPE, 0.1))
    fit_beside(root / "model", "isotropic", 0.1)
    calibrate_beside(root, 0.1)
    if kind == "restore":
        words = command(root, out, operator=str(root / "mask.png"), covariance=covariance)
    else:
        more = {
            "sample": f"-n 2 --sampler gibbs-down --sweeps 1 --covariance {covariance}",
            "posterior": f"{root / 'clean.npz'} --sigma 0.2 --components 0 --draws 0",
        }[kind]
        words = [kind, str(root / "model"), *more.split(), "--out", str(out), "-q"]
    assert run(words).exit_code == 0
    shutil.copytree(root, kept)
    record = next(out.glob("*.json"))
    before = record.read_bytes()
    change(root)
    result = run([*words, "--resume"])
    assert result.exit_code == 2, result.output
    assert "begun with other settings" in result.output
    shutil.rmtree(root)
    kept.rename(root)
    result = run([*words, "--resume"])  # as it was: nothing to be done
    assert result.exit_code == 0, result.output
    assert record.read_bytes() == before


def test_a_call_does_not_go_on_with_other_measurements_or_another_operator(
    folder: Path, tmp_path: Path
) -> None:
    model, out = load(folder / "model"), tmp_path / "out"
    y = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    settings = RestorationSettings(noise=0.1, covariance="diagonal", steps=3, draws=2)
    halves = linear(lambda x: x[..., ::2, ::2] / 2, SHAPE)
    thirds = linear(lambda x: x[..., ::2, ::2] / 3, SHAPE)
    restore_into(out, model, Measurements(y, halves), settings)
    for other, changed in (
        (Measurements(y + 0.1, halves), "inputs.y"),
        (Measurements(y, thirds), "inputs.operator"),
    ):
        with pytest.raises(UsageError, match=changed):
            restore_into(out, model, other, settings, resume=True)
    restore_into(out, model, Measurements(y, halves), settings, resume=True)


def zipped(part: Path) -> None:
    with part.open("wb") as stream:
        numpy.savez(stream, numpy.zeros((3, *SHAPE), numpy.float32))


def named_oddly(part: Path) -> None:
    for name in ("0abc", "99999999999999999999", "0000000"):
        shutil.copy(part, part.with_name(f"{name}.npy"))


DAMAGES: list[Callable[[Path], object]] = [
    lambda part: numpy.save(part, numpy.full_like(numpy.load(part), numpy.nan)),
    lambda part: numpy.save(part, numpy.zeros((2, *SHAPE), numpy.float32)),
    lambda part: part.write_bytes(part.read_bytes()[:-3]),
    zipped,
    named_oddly,
]


@pytest.mark.usefixtures("stopped")
def test_damaged_parts_are_made_again(folder: Path, tmp_path: Path) -> None:
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    few = {"images": "small.npz", "batch-size": "3"}
    assert run(command(folder, begun, **few)).exit_code == 130
    assert run(command(folder, whole, **few)).exit_code == 0
    for number, damage in enumerate(DAMAGES):
        out = tmp_path / str(number)
        shutil.copytree(begun, out)
        damage(out / ".parts" / "000000.npy")
        result = run(command(folder, out, "--resume", **few))
        assert result.exit_code == 0, result.output
        numpy.testing.assert_array_equal(draws_of(whole), draws_of(out))


def test_files_have_the_names_of_their_images_and_the_noise_is_told(
    folder: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("b.one", "\u4e00" * 82, "a/x", "b/x", "b/X"):
        file = tmp_path / "photos" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        noisy = 0.5 + 0.1 * torch.randn(8, 8, generator=generator)
        Image.fromarray((255 * noisy.clamp(0, 1)).byte().numpy()).save(file)
    (tmp_path / "model").symlink_to(folder / "model")
    out, single = tmp_path / "out", tmp_path / "single"
    result = run(command(tmp_path, out, images="photos", noise="estimate", operator="blur:0.5"))
    assert result.exit_code == 0, result.output
    expected = ["a-x", "b-X", "b-x-2", "b.one", "\u4e00" * 40]
    for kind in ("mean", "std"):
        assert sorted(file.stem for file in (out / kind).iterdir()) == sorted(expected)
    images = record_of(out)["images"]
    assert sorted(image["name"] for image in images) == sorted(expected)
    assert len({image["noise"] for image in images}) == 5
    for image in images:
        assert 0.03 < image["noise"] < 0.3
        assert f"{image['noise']:.3g} ({image['name']})" in result.output
    result = run(command(tmp_path, single, images="photos/b.one.png", operator="blur:0.5"))
    assert result.exit_code == 0, result.output
    assert (single / "mean" / "b.one.png").is_file()
    assert record_of(single)["images"] == [{"name": "b.one", "noise": pytest.approx(0.1)}]


def test_a_noise_for_values_up_to_255_is_refused(folder: Path, tmp_path: Path) -> None:
    words = [str(folder / "model"), str(folder / "clean.npz"), "--out", str(tmp_path / "out"), "-q"]
    for more in (
        ["restore", *words, "--operator", "box:2", "--noise", "25"],
        ["restore", *words, "--operator", "box:2", "--noise", "25", "--simulate"],
        ["posterior", *words, "--sigma", "25"],
    ):
        result = run(more)
        assert (result.exit_code, "25/255 = 0.098" in result.output) == (2, True)
    assert not (tmp_path / "out").exists()
    model, box = load(folder / "model"), Box(SHAPE, 2)
    with pytest.raises(UsageError, match="10/255"):
        restoration.restore(model, torch.zeros(2, *SHAPE), box, noise=torch.tensor([0.1, 10.0]))
    with pytest.raises(UsageError, match="5/255"):
        image_posterior(model, torch.zeros(SHAPE), 5)
    sums = Matrix(torch.ones(4, 64), SHAPE)  # of 64 pixels: measurements up to 64
    settings: dict[str, Any] = {"covariance": "diagonal", "steps": 2, "draws": 1, "progress": None}
    restoration.restore(model, torch.full((1, 4), 30.0), sums, noise=6.0, **settings)


@pytest.mark.parametrize(
    ("options", "simulate", "says"),
    [
        ({"operator": "sr:3"}, False, "got 3"),
        ({"operator": "bur:1"}, False, "did you mean 'blur'"),
        ({"operator": "sr"}, False, "sr:4"),
        ({"operator": "wrong.png"}, False, "4 x 8"),
        ({"noise": "-1"}, True, "got -1"),
        ({"noise": "much"}, False, "'much'"),
        ({"noise": "estimate"}, True, "estimate"),
        ({}, False, "1 x 4 x 4; clean images"),
        ({"covariance": "spectral"}, True, "spectral"),
        ({"covariance": "spectra"}, True, "did you mean 'spectral'"),
        ({"products": "2"}, True, "products"),
    ],
)
def test_what_is_refused_in_one_line(
    folder: Path, tmp_path: Path, options: dict[str, str], simulate: bool, says: str
) -> None:
    if options.get("operator", "").endswith(".png"):
        options = {"operator": str(folder / options["operator"])}
    result = run(command(folder, tmp_path / "out", *["--simulate"] * simulate, **options))
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert not (tmp_path / "out" / "restored.json").exists()


def test_operators_by_name(folder: Path) -> None:
    shape = (3, 8, 8)
    kinds = {
        "sr:4": Downsample,
        "gray": Grayscale,
        "motion:3": Blur,
        "blur:1.5": Blur,
        "box:4": Box,
    }
    for text, kind in kinds.items():
        assert isinstance(parse_operator(text, shape), kind)
    random, again, other = (parse_operator("random:0.75", shape, seed=seed) for seed in (3, 3, 4))
    assert isinstance(random, Mask)
    assert random.keep.tensor.sum() == 3 * 16
    assert torch.equal(random.keep.tensor, again.keep.tensor)  # type: ignore[attr-defined]
    assert not torch.equal(random.keep.tensor, other.keep.tensor)  # type: ignore[attr-defined]
    mask = parse_operator(str(folder / "mask.png"), shape)
    assert isinstance(mask, Mask)
    assert mask.keep.tensor[:, 2:].all()
    assert not mask.keep.tensor[:, :2].any()


def test_nothing_is_written_where_measurements_are_not_finite(folder: Path, tmp_path: Path) -> None:
    measurements = Measurements(torch.full((1, *SHAPE), float("nan")), Box(SHAPE, 2))
    with pytest.raises(UsageError, match="row 0"):
        restore_into(
            tmp_path / "out", load(folder / "model"), measurements, RestorationSettings(0.1)
        )
    assert not (tmp_path / "out").exists()


def test_simulated_noise_has_its_size_and_does_not_depend_on_the_number_of_images() -> None:
    truth, operator = torch.zeros(4, 1, 32, 32), Downsample((1, 32, 32), 2)
    y = simulated(truth, operator, 0.3, seed=1)
    assert y.std().item() == pytest.approx(0.3, rel=0.1)
    assert torch.equal(simulated(truth[:2], operator, 0.3, seed=1), y[:2])


def test_a_warning_where_the_model_was_trained_on_the_images_it_is_judged_by(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "faces").mkdir()
    for i, pixels in enumerate(numpy.load(folder / "clean.npz")["arr_0"]):
        Image.fromarray(pixels[..., 0]).save(tmp_path / "faces" / f"{i}.png")
    config = tmp_path / "model" / "config.json"
    trained_on = f"{tmp_path / 'faces'}:test"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"trained_on": trained_on}))
    for images, warned in (("faces:test", True), ("faces:train", False)):
        result = run(command(tmp_path, tmp_path / images, "--simulate", images=images))
        assert result.exit_code == 0, result.output
        assert (f"was trained on {trained_on}" in result.output) == warned
