"""load: NCSNv2 checkpoints, EDM-style networks and models of mmdgs as denoisers at any level."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import torch
from nets import lively, tiny_model, tiny_pipeline
from shared import NCSNV2, needs_ncsnv2
from test_models import armed, refused
from torch import Tensor, nn
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.models import Model, ModelConfig
from mmdgs.moments.probes import Lattice, Rademacher
from mmdgs.networks import NCSNv2, preset
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import seeded

SIGMAS = [4.0, 1.0, 0.25]
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64
Content = list[object]


def images(n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape, generator=seeded(5))


def public_format(
    network: nn.Module, average: nn.Module | None, sigmas: list[float] = SIGMAS
) -> Content:
    """As the public code writes: [state of a DataParallel, optimiser, epoch, step, average]."""
    state = {"module.sigmas": torch.tensor(sigmas)}
    state |= {f"module.{key}": value for key, value in network.state_dict().items()}
    optimiser = {"state": {}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.999)}]}
    items: Content = [state, optimiser, 3, 4]
    return items if average is None else [*items, dict(average.named_parameters())]


def write(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def networks() -> tuple[NCSNv2, NCSNv2]:
    """Raw and averaged weights."""
    return lively(NCSNv2(1, width=4), 1), lively(NCSNv2(1, width=4), 2)


@pytest.fixture
def content(networks: tuple[NCSNv2, NCSNv2]) -> Content:
    return public_format(*networks)


@pytest.fixture
def checkpoint(content: Content, tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint.pth", content)


# --- NCSNv2: what is read


@needs_ncsnv2
@pytest.mark.parametrize(("ema", "key"), [(True, "score_ema"), (False, "score_raw")])
def test_parity_with_the_original_network(ema: bool, key: str) -> None:
    model = mmdgs.load(NCSNV2 / "checkpoint.pth", ema=ema)
    arrays = numpy.load(NCSNV2 / "expected.npz")
    expected = {name: torch.from_numpy(value) for name, value in arrays.items()}
    assert (model.shape, model.interval) == ((3, 32, 32), (0.0, 1.0))
    assert [level.sigma for level in model.levels] == expected["sigmas"].tolist()
    rows = NoiseLevels.of([model.levels[i] for i in expected["level"]], expected["x"])
    error = model.network(expected["x"], rows) - expected[key]
    assert error.norm() < 1e-5 * expected[key].norm()


def test_checkpoints_in_the_public_format(
    networks: tuple[NCSNv2, NCSNv2], content: Content, checkpoint: Path, tmp_path: Path
) -> None:
    x, level = images(1, 1, 8, 8), NoiseLevel(sigma=1.0)
    old = tmp_path / "old.pth"
    torch.save(content, old, _use_new_zipfile_serialization=False)  # before torch 1.6
    state = {str(key).removeprefix("module."): value for key, value in content[0].items()}
    plain = write(tmp_path / "plain.ckpt", (state, *content[1:]))
    bare = write(tmp_path / "bare.pt", state)
    for path, ema in (
        (checkpoint, True),
        (checkpoint, False),
        (old, True),
        (plain, True),
        (bare, False),
    ):
        model = mmdgs.load(str(path), ema=ema, size=8)
        expected = x + networks[ema](x, level)
        torch.testing.assert_close(model(x, level), expected.detach())
        assert model.shape == (1, 8, 8)
        assert model.levels == tuple(NoiseLevel(sigma=sigma) for sigma in SIGMAS)
        assert not model.network.training
        assert not any(p.requires_grad for p in model.network.parameters())


def test_the_size_of_celeba_is_known_by_its_levels(tmp_path: Path) -> None:
    sigmas = torch.logspace(numpy.log10(90.0), -2, 500).tolist()
    network = NCSNv2(3, width=2)
    path = write(tmp_path / "celeba.pth", public_format(network, network, sigmas))
    assert mmdgs.load(path).shape == (3, 64, 64)
    assert mmdgs.load(path, size=32).shape == (3, 32, 32)
    assert mmdgs.load(write(path, public_format(network, network, sigmas[1:]))).shape == (3, 32, 32)


# --- NCSNv2: what is refused


def changed(content: Content, where: int, **changes: object) -> Content:
    """The content with tensors of item `where` changed; None removes one; __ is a dot."""
    items = list(content)
    state = dict(items[where]) | {key.replace("__", "."): value for key, value in changes.items()}
    items[where] = {key: value for key, value in state.items() if value is not None}
    return items


MISTAKES: dict[str, tuple[Callable[[Content], object], str]] = {
    "no average": (lambda c: c[:4], "ema=False"),
    "levels the wrong way": (
        lambda c: changed(c, 0, module__sigmas=torch.tensor(SIGMAS[::-1])), "to the cleanest"
    ),
    "a tensor missing": (lambda c: changed(c, 4, end_conv__bias=None), "such as end_conv.bias"),
    "a deeper network": (
        lambda c: changed(c, 4, res31__0__conv1__weight=torch.zeros(1)),
        "such as res31.0.conv1.weight",
    ),
    "not finite": (
        lambda c: changed(c, 4, end_conv__bias=torch.tensor([float("nan")])), "in end_conv.bias"
    ),
    "another network": (lambda c: [{"conv.weight": torch.zeros(1)}], "begin_conv.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_checkpoints_that_are_refused(case, content: Content, tmp_path: Path) -> None:
    change, part = case
    path = write(tmp_path / "checkpoint.pth", change(content))
    with refused(str(path), part):
        mmdgs.load(path)


def test_files_that_are_no_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    whole = checkpoint.read_bytes()
    contents = {
        "cut.pth": whole[: int(0.99 * len(whole))],
        "a.pth": b"PK\x03\x04 no zip",
        "a.pkl": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with refused(name):
            mmdgs.load(tmp_path / name)


@pytest.mark.parametrize("how", ["pickle", "old", "new"])
def test_a_pickle_with_code_is_refused_and_not_run(
    how: str, content: Content, tmp_path: Path
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "checkpoint.pth"
    content[1] = armed(marker)
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "new")
    with refused("checkpoint.pth is refused"):
        mmdgs.load(path)
    assert not marker.exists()


# --- convert


def converted(*words: object) -> object:
    return CliRunner().invoke(cli.app, ["convert", *map(str, words)])


def test_convert_writes_a_models_folder(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "model"
    result = converted(checkpoint, "--out", out, "--size", 8)
    assert result.exit_code == 0, result.output
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    x, level = images(2, 1, 8, 8), NoiseLevel(sigma=1.0)
    expected, model = mmdgs.load(checkpoint, size=8), mmdgs.load(out)
    assert torch.equal(model(x, level), expected(x, level))
    assert (model.digest, model.config) == (expected.digest, expected.config)
    assert model.card is not None
    assert "license" not in model.card


def test_convert_overwrites_only_models_and_only_when_asked(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert converted(checkpoint, "--out", out).exit_code == 0
    before = (out / "model.safetensors").read_bytes()
    result = converted(checkpoint, "--out", out, "--raw")
    assert result.exit_code == 2
    assert "use --overwrite" in " ".join(result.output.split())
    assert (out / "model.safetensors").read_bytes() == before
    assert converted(checkpoint, "--out", out, "--raw", "--overwrite").exit_code == 0
    assert (out / "model.safetensors").read_bytes() != before
    (out / "config.json").unlink()
    result = converted(checkpoint, "--out", out, "--overwrite")
    assert "other things than a model" in " ".join(result.output.split())
    assert (out / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pth", "model"]


# --- EDM


class GaussianEdm(nn.Module):
    """The exact denoiser of N(m, s^2) data, called as EDM's networks are."""

    sigma_min, sigma_max, img_channels, img_resolution = 0.0, float("inf"), 2, 4
    m, s = 0.3, 0.7

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        assert class_labels is None
        sigma = sigma.reshape(-1, 1, 1, 1)  # as EDM does
        return self.m + self.s**2 / (self.s**2 + sigma**2) * (x - self.m) * self.weight


@pytest.mark.parametrize(
    "level", [NoiseLevel(sigma=0.5), NoiseLevel(alpha=0.6, sigma=0.8)], ids=["plain", "scaled"]
)
def test_edm_is_exact_for_a_gaussian(level: NoiseLevel) -> None:
    model = mmdgs.load(GaussianEdm())
    assert (model.shape, model.interval, model.source) == ((2, 4, 4), (-1.0, 1.0), "GaussianEdm")
    assert not model.network.training
    x_t = images(3, 2, 4, 4).double()
    m, s = GaussianEdm.m, GaussianEdm.s
    total = level.alpha**2 * s**2 + level.sigma**2
    mean = m + level.alpha * s**2 / total * (x_t - level.alpha * m)
    q = mmdgs.DiagonalMoments(model, probes=None)(x_t, level)
    torch.testing.assert_close(q.mean, mean, **EXACT)
    variance = torch.full_like(x_t, s**2 * level.sigma**2 / total)
    torch.testing.assert_close(q.cov.diagonal(), variance, **EXACT)


def test_edms_levels_are_those_of_its_sampler() -> None:
    levels = mmdgs.load(GaussianEdm()).levels
    assert len(levels) == 18
    # Karras et al. (2022), eq. 5 with rho = 7, 80 to 0.002: the second of 18 is 57.586.
    assert [round(levels[i].sigma, 3) for i in (0, 1, 17)] == [80.0, 57.586, 0.002]
    narrow = GaussianEdm()
    narrow.sigma_min, narrow.sigma_max = 0.01, 10.0
    levels = mmdgs.load(narrow).levels
    assert (round(levels[0].sigma, 9), round(levels[-1].sigma, 9)) == (10.0, 0.01)


def test_a_function_will_do_and_labels_are_none() -> None:
    def network(x: Tensor, sigma: Tensor, labels: object) -> Tensor:
        assert labels is None
        return x / (1 + sigma**2)

    network.img_channels = 1
    model = mmdgs.load(network, size=8)
    assert (model.shape, model.source) == ((1, 8, 8), "network")
    x = images(2, 1, 8, 8)
    torch.testing.assert_close(model(x, NoiseLevel(sigma=2.0)), x / 5)
    with refused("holds no weights"):
        _ = model.digest


def test_networks_that_are_not_edms() -> None:
    with refused("score_denoiser"):
        mmdgs.load(nn.Linear(1, 1, device="meta"))
    network = GaussianEdm()
    network.img_channels = None
    with refused("img_channels"):
        mmdgs.load(network)


# --- models of mmdgs


def many_levels(alphas: tuple[float, ...] = ()) -> Model:
    """A conditional U-Net with three levels."""
    options = preset("unet-tiny")[1] | {"conditional": True}
    return tiny_model("noise", options=options, sigma=None, sigmas=(0.9, 0.6, 0.3), alphas=alphas)


def test_a_model_is_a_denoiser_at_its_level_and_at_that_level_rescaled() -> None:
    model, x = tiny_model(), images(2, 1, 8, 8)
    expected = model.denoiser_of(model.network)(x, model.level).detach()
    torch.testing.assert_close(model(x, model.level), expected)
    torch.testing.assert_close(model(0.4 * x, NoiseLevel(alpha=0.4, sigma=0.2)), expected)
    other = NoiseLevel(sigma=0.6)
    for level in (other, NoiseLevels.of([model.level, other], x)):
        with refused("sigma=0.5) alone"):
            model(x, level)


def test_between_levels_the_alpha_is_interpolated() -> None:
    model, x = many_levels((0.2, 0.8, 0.9)), images(1, 1, 8, 8)
    ratio = (0.9 / 0.2 * 0.6 / 0.8) ** 0.5  # half way between the first two, in log
    alpha = (0.2 * 0.8) ** 0.5
    level = NoiseLevel(alpha=alpha, sigma=alpha * ratio)
    expected = model.denoiser_of(model.network)(alpha * x, level)
    torch.testing.assert_close(model(x, NoiseLevel(sigma=ratio)), expected)


def test_models_by_name_by_folder_and_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = many_levels()
    folder = mmdgs.save(model, tmp_path / "someone")
    x, level = images(1, 1, 8, 8), model.levels[1]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    expected = model.denoiser_of(model.network)(x, level).detach()
    for source, options in (
        (folder, {}),
        (tmp_path, {"subfolder": "someone"}),
        ("some/one", {"subfolder": "someone"}),
    ):
        torch.testing.assert_close(mmdgs.load(source, **options)(x, level), expected)
    digits = mmdgs.load("mnist")
    assert (digits.shape, digits.source) == ((1, 28, 28), "mnist")
    assert mmdgs.load(digits) is digits


KINDS = {
    "a folder of ours": lambda path: mmdgs.save(many_levels(), path / "ours"),
    "an EDM network": lambda path: GaussianEdm().float(),
    "a pipeline": lambda path: tiny_pipeline(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_loaded_is_one_model(kind: str, tmp_path: Path) -> None:
    if kind == "a pipeline":
        pytest.importorskip("diffusers")
    model = mmdgs.load(KINDS[kind](tmp_path))
    assert isinstance(model, Model)
    level, x = model.levels[0], images(2, *model.shape)
    mean = model(x, level)
    assert mean.shape == x.shape
    q = model.posterior(mmdgs.covariances.Diagonal(probes=2))(x, level, generator=seeded(0))
    torch.testing.assert_close(q.mean, mean.detach())
    assert model.posterior().denoiser(x, level).shape == x.shape
    if model.param is None:
        with refused("is no model of mmdgs", "has no configuration"):
            mmdgs.save(model, tmp_path / "again")
        with refused("has no learned posterior"):
            model.posterior("learned")


def test_a_model_with_mean_and_std_is_a_denoiser_by_its_mean() -> None:
    model, x = tiny_model("mean-std"), images(2, 1, 8, 8)
    learned = model.posterior()
    assert isinstance(learned, mmdgs.LearnedMoments)
    q = learned(x, model.level)
    assert torch.equal(model(x, model.level), q.mean)
    full = model.posterior("full")(x, model.level)
    torch.testing.assert_close(full.mean, q.mean.detach())


def test_a_closed_form_jacobian_is_the_models_too() -> None:
    options, levels = {"width": 8, "depth": 2}, {"sigmas": (0.9, 0.6), "alphas": (0.2, 0.8)}
    config = ModelConfig("mlp", "energy", (2,), options, **levels)
    model = Model.build(config, seed=1)
    model.network.double()
    x, level = images(3, 2).double(), NoiseLevel(alpha=0.5, sigma=0.9)
    known = model.mean_and_jacobian(x, level)
    assert known is not None
    # (outputs, rows, inputs)
    each = torch.autograd.functional.jacobian(lambda x_t: model(x_t, level).sum(0), x)
    torch.testing.assert_close(known[0], model(x, level).detach(), **EXACT)
    torch.testing.assert_close(known[1], each.transpose(0, 1), **EXACT)


def test_covariances_by_name() -> None:
    model = tiny_model()
    kinds = {
        "diagonal": mmdgs.DiagonalMoments(model, probes=3),
        "rademacher": mmdgs.DiagonalMoments(model, probes=3, design=Rademacher()),
        "lattice": mmdgs.DiagonalMoments(model, probes=3, design=Lattice()),
        "krylov": mmdgs.KrylovMoments(model, steps=20),
        "full": mmdgs.FullMoments(model),
    }
    for name, expected in kinds.items():
        assert model.posterior(name) == expected
    assert model.posterior() == kinds["diagonal"]
    krylov = mmdgs.covariances.Krylov(steps=5, symmetric=True)
    assert model.posterior(krylov) == mmdgs.KrylovMoments(model, steps=5, symmetric=True)
    for name, part in (
        ("diagnal", "did you mean 'diagonal'"),
        ("ocm", "--head"),
        ("learned", "'energy'"),
        ("isotropic", "--data"),
    ):
        with refused(part):
            model.posterior(name)


# --- any level


@pytest.fixture(params=["ncsnv2", "edm", "conditional", "preserving"])
def any_level(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Model]:
    """Denoisers of every kind (diffusers': test_diffusion.py), in float64."""
    make = {
        "ncsnv2": lambda: checkpoint,
        "edm": GaussianEdm,
        "conditional": many_levels,
        "preserving": lambda: many_levels((0.1**0.5, 0.8, 0.91**0.5)),
    }
    return mmdgs.load(make[request.param](), dtype=torch.float64)


LEVELS = [
    NoiseLevel(alpha=0.5, sigma=0.2),
    NoiseLevel(alpha=0.9, sigma=0.7),
    NoiseLevel(alpha=2.0, sigma=1.5),
]


def test_what_is_no_batch_or_no_noise_is_refused() -> None:
    any_level = many_levels()
    with pytest.raises(ValueError, match="clean level"):
        any_level(images(1, *any_level.shape), mmdgs.CLEAN)
    with pytest.raises(ValueError, match="must be a batch"):
        any_level(torch.zeros(5), LEVELS[0])


def test_another_alpha_is_the_same_problem_rescaled(any_level: Model) -> None:
    x_t = images(2, *any_level.shape[:1], 8, 8).double()
    for level in LEVELS:
        expected = any_level(x_t / level.alpha, NoiseLevel(sigma=level.sigma / level.alpha))
        torch.testing.assert_close(any_level(x_t, level), expected, rtol=1e-6, atol=1e-7)
        assert (expected - x_t / level.alpha).abs().max() > 1e-3


def test_rows_may_have_levels_of_their_own(any_level: Model) -> None:
    x_t = images(3, *any_level.shape[:1], 8, 8).double()
    expected = torch.cat([any_level(x_t[i : i + 1], level) for i, level in enumerate(LEVELS)])
    rows = any_level(x_t, NoiseLevels.of(LEVELS, x_t))
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)
