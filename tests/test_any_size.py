"""Models of images of any size: restoration of each at its own, samples, lists, exports."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import Result
from PIL import Image
from torch import Tensor
from toy_models import InDouble, Weights, any_size_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, schedules
from mmdgs.covariances import LowRank, Spectral
from mmdgs.errors import UsageError
from mmdgs.linalg.spectral import from_cosines, to_cosines
from mmdgs.models import Model
from mmdgs.models.fits import CROP, FitStore
from mmdgs.moments import SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.operators import Downsample, Matrix, linear
from mmdgs.restoration import checks, draws as restoration
from mmdgs.restoration.folder import Measurements, restore_into, simulated
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.targets import GaussianMixture

# --- a Gaussian field, exactly

LEVELS = schedules.geometric(8, 20.0, 0.01)
FIT = (16, 16)


def spectrum(height: int, width: int) -> Tensor:
    """The variance of a field's coefficients, a function of frequency."""
    f, g = torch.arange(height).double() / height, torch.arange(width).double() / width
    return (0.3 * (-4 * (f[:, None] + g)).exp() + 0.002)[None]


def wiener(x_t: Tensor, level: NoiseLevel) -> Tensor:
    prior = spectrum(*x_t.shape[2:])
    return from_cosines(prior / (prior + level.variance) * to_cosines(x_t) / level.alpha)


def field_model() -> Model:
    return Model(InDouble(wiener), Weights(), LEVELS, (1, None, None), source="a field")


def fitted(model: Model) -> SpectralMoments:
    """The exact spectra of the posterior at one size."""
    prior = spectrum(*FIT)
    exact = {level: prior * level.variance / (prior + level.variance) for level in LEVELS}
    return SpectralMoments(model, LevelTable.of(exact))


@pytest.mark.parametrize("sides", [(8, 16), (16, 8), (8, 8)], ids=str)
def test_restoration_is_exact_at_two_sizes_by_one_fit(sides: tuple[int, int]) -> None:
    """Frequencies of 8 are among those of the fit's 16, so that its spectrum is exact here too."""
    shape, draws = (1, *sides), 600
    model, operator = field_model(), Downsample(shape, 2)
    d = sides[0] * sides[1]
    basis = to_cosines(torch.eye(d, dtype=torch.float64).reshape(d, *shape)).flatten(1)
    prior = GaussianMixture(
        [1.0], torch.zeros(1, d).double(), (basis * spectrum(*sides).flatten() @ basis.mT)[None]
    )
    y = torch.rand(1, *operator.out_shape, generator=torch.Generator().manual_seed(0))
    matrix = operator(torch.eye(d, dtype=torch.float64).reshape(d, *shape)).flatten(1).mT
    expected = prior.given(y.flatten(1).double(), matrix, 0.05)
    restored = mmdgs.restore(
        model, y, operator, noise=0.05, covariance=fitted(model), levels=LEVELS, draws=draws,
        chains="bridge", progress=None,
    )  # fmt: skip
    deviation = expected.covariance.diagonal(dim1=1, dim2=2).sqrt()
    z = (restored.mean.flatten(1) - expected.mean) / deviation
    assert z.abs().max() < 4.5 / draws**0.5
    ratio = restored.std.flatten(1) / deviation
    assert (ratio - 1).abs().max() < 4.5 / (2 * draws) ** 0.5


def test_the_size_is_that_of_the_operator_or_of_the_measurements() -> None:
    model = field_model()
    settings: dict[str, Any] = {"noise": 0.1, "levels": LEVELS, "draws": 1, "progress": None}
    moments = fitted(model)
    halves = linear(lambda x: x[..., ::2], (1, 8, 16))
    assert mmdgs.restore(moments, torch.zeros(2, 1, 8, 8), halves, **settings).draws.shape == (
        *(1, 2, 1, 8, 16),
    )

    class Physics:
        """As those of deepinv, which do not know the shape of x."""

        def A(self, x: Tensor) -> Tensor:  # noqa: N802
            return x / 2

        A_adjoint = A

    same = mmdgs.restore(moments, torch.zeros(2, 1, 5, 7), Physics(), **settings)
    assert same.draws.shape == (1, 2, 1, 5, 7)
    rows = torch.eye(12)[:4]
    for operator in (rows, Matrix(rows, (1, 3, 4))):
        with pytest.raises(UsageError, match="shape"):
            mmdgs.restore(moments, torch.zeros(2, 4), rows, **settings)
        given = {"shape": (1, 3, 4)} if operator is rows else {}
        sums = mmdgs.restore(model, torch.zeros(2, 4), operator, covariance=moments,
                             **given, **settings)  # fmt: skip
        assert sums.draws.shape == (1, 2, 1, 3, 4)


def test_views_have_the_weights_and_the_digest() -> None:
    model = any_size_model()
    view = model.sized(20, 24)
    assert (view.shape, view.digest, view.network) == ((3, 20, 24), model.digest, model.network)
    assert model.shape == (3, None, None)
    assert view.sized(16, 17).shape == (3, 16, 17)
    for sides, said in (((15, 40), "too small"), ((1 << 14, 1 << 14), "make it smaller")):
        with pytest.raises(UsageError, match=said):
            model.sized(*sides)


# --- folders of several sizes


@pytest.fixture
def field_measurements() -> list[Measurements]:
    return [
        Measurements(torch.rand(count, 1, *sides, generator=torch.Generator().manual_seed(count)),
                     linear(lambda x: 2 * x, (1, *sides)))
        for count, sides in ((1, (8, 16)), (2, (16, 8)), (1, (5, 6)))
    ]  # fmt: skip


def test_images_of_several_sizes_are_restored_as_alone(
    field_measurements: list[Measurements], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = field_model(), tmp_path / "out"
    settings = RestorationSettings(0.1, fitted(model), draws=3, levels=LEVELS)
    draw, drawn = restoration.Restoration.draws, []

    def draws(work: Any, start: int, stop: int, **options: Any) -> Any:
        drawn.append(work.first + start)
        if drawn == [0, 1]:
            raise KeyboardInterrupt
        return draw(work, start, stop, **options)

    monkeypatch.setattr(restoration.Restoration, "draws", draws)
    with pytest.raises(KeyboardInterrupt):
        restore_into(out, model, field_measurements, settings)
    restore_into(out, model, field_measurements, settings, resume=True)
    assert drawn == [0, 1, 1, 3]
    monkeypatch.undo()
    first = 0
    for part in field_measurements:
        alone = mmdgs.restore(
            fitted(model), part.y, part.operator, noise=0.1, draws=3, levels=LEVELS, first=first,
            progress=None,
        ).draws  # fmt: skip
        for i in range(len(part.y)):
            with numpy.load(out / "draws" / f"{first:06d}.npz") as arrays:
                torch.testing.assert_close(torch.from_numpy(arrays["draws"]), alone[:, i : i + 1])
                assert arrays["mean"].shape == alone[0, i : i + 1].shape
            first += 1
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    restore_into(out, model, field_measurements, settings, resume=True)  # nothing to be done
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}


def photographs_and_model(root: Path) -> Path:
    """A tiny model with flat spectra, and photographs of several sizes."""
    mmdgs.save(any_size_model(), root / "model")
    model = mmdgs.load(root / "model")
    table = LevelTable.of({level: torch.ones(3, CROP, CROP) for level in model.levels})
    FitStore(model, "spectral").write(root / "model" / "spectral.safetensors", {"images": 2}, table)
    (root / "photos").mkdir()
    for i, size in enumerate([(20, 17), (33, 21), (20, 17)]):
        picture(size, seed=i).save(root / "photos" / f"{'abc'[i]}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs_and_model(tmp_path_factory.mktemp("any-size"))


def picture(size: tuple[int, int], mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth picture (width, height) in colour, brought to a mode."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode)


def restore(folder: Path, images: Path | str, out: Path, *more: str) -> Result:
    words = ["restore", str(folder / "model"), str(images), "--out", str(out), "--device", "cpu"]
    small = ["--draws", "2", "--steps", "2"]
    return CliRunner().invoke(cli.app, [*words, *small, *more])


def sizes(out: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for file in (out / "mean").iterdir():
        with Image.open(file) as image:
            found[file.stem] = image.size
    return found


def test_a_folder_of_photographs_is_restored_each_at_its_size(folder: Path, tmp_path: Path) -> None:
    result = restore(folder, folder / "photos", tmp_path / "up", "--operator", "sr:2", "--noise=.1")
    assert result.exit_code == 0, result.output
    assert f"by the model {folder / 'model'}" in result.output.replace("\n", "")
    assert sizes(tmp_path / "up") == {"a": (40, 34), "b": (66, 42), "c": (40, 34)}
    with numpy.load(tmp_path / "up" / "draws" / "b.npz") as arrays:
        assert arrays["draws"].shape == (2, 1, 3, 42, 66)
    words = ("--simulate", "--operator", "sr:4", "--noise", "0.1")
    result = restore(folder, folder / "photos", tmp_path / "down", *words)
    assert result.exit_code == 0, result.output
    assert "b: 33 x 21 pixels were cropped to 32 x 20, multiples of 4" in result.output
    assert sizes(tmp_path / "down") == {"a": (20, 16), "b": (32, 20), "c": (20, 16)}
    record = json.loads((tmp_path / "down" / "restored.json").read_text())
    assert {"psnr_mean", "crps", "coverage_90"} <= record["scores"].keys()


def test_measurements_of_an_image_do_not_depend_on_the_others(folder: Path, tmp_path: Path) -> None:
    truth = torch.rand(3, 3, 16, 20, generator=torch.Generator().manual_seed(0))
    operator = Downsample((3, 16, 20), 2)
    whole = simulated(truth, operator, 0.1, seed=3)
    for i in range(3):
        one = simulated(truth[i : i + 1], operator, 0.1, seed=3, first=i)
        torch.testing.assert_close(one, whole[i : i + 1])


@pytest.mark.parametrize("operator", ["blur:1", "motion:3", "random:0.5", "box:4", "gray", "mask"])
def test_operators_take_the_size_of_the_image(folder: Path, tmp_path: Path, operator: str) -> None:
    if operator == "mask":
        mask = numpy.full((17, 20), 255, numpy.uint8)
        mask[:3] = 0
        operator = str(tmp_path / "mask.png")
        Image.fromarray(mask).save(operator)
    image = folder / "photos" / "a.png"
    for more in (["--simulate"], []):
        out = tmp_path / str(len(more))
        result = restore(folder, image, out, "--operator", operator, "--noise", "0.1", *more)
        assert result.exit_code == 0, result.output
        assert sizes(out) == {"a": (20, 17)}
    if operator.endswith("mask.png"):
        result = restore(
            *(folder, folder / "photos", tmp_path / "all", "--operator", operator, "--noise=0.1")
        )
        assert result.exit_code == 2
        assert "b: the mask" in result.output
        assert not (tmp_path / "all").exists()


FILES = {
    "cmyk.jpg": lambda file: picture((20, 17), "CMYK").save(file),
    "palette.png": lambda file: picture((20, 17), "P").save(file),
    "alpha.png": lambda file: picture((20, 17), "RGBA").save(file),
    "grey.png": lambda file: picture((20, 17), "L").save(file),
    "deep.png": lambda file: Image.fromarray(
        numpy.full((17, 20), 40_000, numpy.uint16)
    ).save(file),
    "turned.jpg": lambda file: picture((17, 20)).save(file, exif=turned()),
    "moving.gif": lambda file: picture((20, 17)).save(
        file, save_all=True, append_images=[picture((20, 17), seed=1)]
    ),
}  # fmt: skip


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown by a quarter turn
    return exif


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FILES[name](tmp_path / name)
    out = tmp_path / "out"
    result = restore(folder, tmp_path / name, out, "--operator", "blur:1", "--noise", "0.1")
    assert result.exit_code == 0, result.output
    assert sizes(out) == {Path(name).stem: (20, 17)}
    grey = name in ("grey.png", "deep.png")  # not repeated in three colours: it counts once
    assert numpy.load(out / "draws.npz")["draws"].shape[2:] == (1 if grey else 3, 17, 20)
    assert ("the first was taken" in caplog.text) == (name == "moving.gif")


def huge_png(file: Path, side: int) -> None:
    """A PNG that says its sides, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(100)))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (lambda file: picture((1, 1)).save(file), [], "1 x 1 pixels is too small"),
        (lambda file: huge_png(file, 20_000), [], "400000000 pixels"),
        (lambda file: huge_png(file, 5_000), [], "5000 x 5000 pixels, and"),
        (lambda file: file.write_bytes(b"none"), [], "cannot be read"),
        (lambda file: picture((20, 17)).save(file), ["--operator", "sr:900"], "make it smaller"),
        (lambda file: picture((20, 17)).save(file), ["--operator", "sr:90"], "of memory"),
        (lambda file: picture((20, 17)).save(file), ["--operator", "box:18"], "does not fit"),
        (lambda file: picture((20, 17)).save(file), ["--quality", "bets"], "mean 'best'"),
    ],
    ids=["one pixel", "bomb", "large", "no image", "sr:900", "memory", "box", "quality"],
)
def test_what_is_refused_in_one_line(
    make: Any, more: list[str], says: str, folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(checks, "memory_of", lambda device: 1 << 20)
    make(tmp_path / "it.png")
    more = more if "--operator" in more else [*more, "--operator", "blur:1"]
    result = restore(folder, tmp_path / "it.png", tmp_path / "out", *more, "--noise", "0.1")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


# --- qualities


@pytest.mark.parametrize(
    ("words", "covariance", "steps"),
    [
        ([], Spectral(), 25),
        (["--quality", "fast"], Spectral(), 10),
        (["--quality", "best"], LowRank(1, symmetric=True), 16),
        (["--quality", "best", "--products", "2"], LowRank(2, symmetric=True), 16),
        (["--quality", "best", "--covariance", "spectral", "--steps", "3"], Spectral(), 3),
    ],
    ids=str,
)
def test_a_quality_is_a_covariance_and_steps(
    words: list[str], covariance: Any, steps: int, folder: Path, tmp_path: Path
) -> None:
    image, common = folder / "photos" / "a.png", ["--operator=blur:1", "--noise=0.1", "--draws=1"]
    result = CliRunner().invoke(
        cli.app,
        [
            *("restore", "--model", str(folder / "model"), str(image)),
            *("--out", str(tmp_path / "out"), "--device", "cpu", *common, *words),
        ],
    )
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "out" / "restored.json").read_text())["settings"]
    assert (settings["covariance"], settings["steps"]) == (covariance.to_json(), steps)


# --- other commands


def test_samples_need_a_size(folder: Path, tmp_path: Path) -> None:
    words = ["sample", str(folder / "model"), "-n", "2", "--steps", "2", "--device", "cpu"]
    out = tmp_path / "out.npz"
    result = CliRunner().invoke(cli.app, [*words, "--out", str(out)])
    assert result.exit_code == 2
    assert "images of any size: say which, such as --size 64" in " ".join(result.output.split())
    assert not out.exists()
    result = CliRunner().invoke(cli.app, [*words, "--out", str(out), "--size", "24"])
    assert result.exit_code == 0, result.output
    with numpy.load(out) as arrays:
        assert arrays["arr_0"].shape == (2, 24, 24, 3)


def test_it_is_exported_and_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(
        cli.app, ["export", str(folder / "model"), "--out", str(tmp_path / "weights" / "photo")]
    )
    assert result.exit_code == 0, result.output
    assert mmdgs.load(tmp_path / "weights" / "photo").shape == (3, None, None)
    file = tmp_path / "src" / "mmdgs" / "models" / "shipped.py"
    monkeypatch.setattr("mmdgs.models.shipped.__file__", str(file))
    monkeypatch.setattr("mmdgs.models.shipped.SHIPPED", {"photo": "photo"})
    result = CliRunner().invoke(cli.app, ["models"])
    assert result.exit_code == 0, result.output
    assert "3 x any size" in result.output
    result = CliRunner().invoke(cli.app, ["models", "--json"])
    entries = {entry["names"][0]: entry for entry in json.loads(result.output)}
    assert entries["photo"]["shape"] == [3, None, None]
