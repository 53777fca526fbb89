"""load: NCSNv2 checkpoints, EDM-style networks and models of mmdgs as denoisers at any level."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import torch
from nets import lively, tiny_model, tiny_pipeline
from shared import NCSNV2, needs_ncsnv2
from test_models import Bomb, refused
from torch import Tensor, nn
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.models import Model, ModelConfig
from mmdgs.models.levels import TrainedLevels
from mmdgs.networks import NCSNv2, preset
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import seeded

SIGMAS = [4.0, 1.0, 0.25]
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64
Content = list[object]


def images(n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape, generator=seeded(5))


def public_format(network: nn.Module, average: nn.Module | None, sigmas: list[float] = SIGMAS) -> Content:
    """What the public code writes: [state of a DataParallel, optimiser, epoch, step, moving average]."""
    state = {"module.sigmas": torch.tensor(sigmas)}
    state |= {f"module.{key}": value for key, value in network.state_dict().items()}
    items: Content = [state, {"state": {}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.999)}]}, 3, 4]
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


def test_samples_of_one_size_do_not_go_on_in_another(checkpoint: Path, tmp_path: Path) -> None:
    words = ["sample", str(checkpoint), "--out", str(tmp_path / "out"), "-n", "1", "--sampler", "heun", "--steps", "2"]
    assert CliRunner().invoke(cli.app, [*words, "--size", "16"]).exit_code == 0
    (tmp_path / "out" / "000000.png").unlink()
    result = CliRunner().invoke(cli.app, [*words, "--size", "8", "--resume"])
    assert result.exit_code == 2
    assert "begun with other settings" in result.output
    assert not (tmp_path / "out" / "000000.png").exists()
    assert CliRunner().invoke(cli.app, [*words, "--size", "16", "--resume"]).exit_code == 0


# --- NCSNv2: what is read ---------------------------------------------------------------------------------------


@needs_ncsnv2
@pytest.mark.parametrize(("ema", "key"), [(True, "score_ema"), (False, "score_raw")])
def test_parity_with_the_original_network(ema: bool, key: str) -> None:
    found = mmdgs.from_pretrained(NCSNV2 / "checkpoint.pth", ema=ema)
    expected = {name: torch.from_numpy(value) for name, value in numpy.load(NCSNV2 / "expected.npz").items()}
    assert found.shape == (3, 32, 32)
    assert found.interval == (0.0, 1.0)
    assert [level.sigma for level in found.levels] == expected["sigmas"].tolist()
    levels = [found.levels[i] for i in expected["level"]]
    each = zip(expected["x"].split(1), levels, expected[key].split(1), strict=True)
    for x, level, score in each:
        torch.testing.assert_close(found.network(x, level), score, rtol=1e-4, atol=1e-4 * score.abs().mean().item())
        torch.testing.assert_close(found(x, level), x + level.sigma**2 * score, rtol=1e-4, atol=1e-4 * level.sigma)
    rows = NoiseLevels.of(levels, expected["x"])
    error = found.network(expected["x"], rows) - expected[key]
    assert error.norm() < 1e-5 * expected[key].norm()


@pytest.mark.parametrize(
    ("channels", "size", "width"), [(1, 28, 4), (3, 64, 4), (3, 32, 8), (1, 32, 6)], ids=lambda n: str(n)
)
def test_any_checkpoint_in_the_public_format(channels: int, size: int, width: int, tmp_path: Path) -> None:
    raw, average = (lively(NCSNv2(channels, width=width), seed) for seed in (1, 2))
    path = write(tmp_path / "a.pth", public_format(raw, average))
    x, level = images(1, channels, size, size), NoiseLevel(sigma=1.0)
    for network, options in ((average, {}), (raw, {"ema": False})):
        found = mmdgs.from_pretrained(path, size=size, **options)
        assert found.shape == (channels, size, size)
        assert found.levels == tuple(NoiseLevel(sigma=sigma) for sigma in SIGMAS)
        torch.testing.assert_close(found(x, level), (x + network(x, level)).detach())
        assert not found.network.training
        assert not any(p.requires_grad for p in found.network.parameters())


def test_other_ways_to_write_one(networks: tuple[NCSNv2, NCSNv2], content: Content, tmp_path: Path) -> None:
    x, level = images(1, 1, 8, 8), NoiseLevel(sigma=1.0)
    old = tmp_path / "old.pth"
    torch.save(content, old, _use_new_zipfile_serialization=False)  # before torch 1.6
    plain = [{str(key).removeprefix("module."): value for key, value in content[0].items()}, *content[1:]]
    bare = write(tmp_path / "bare.pt", plain[0])
    for path, ema in ((old, True), (write(tmp_path / "plain.ckpt", tuple(plain)), True), (bare, False)):
        expected = x + networks[ema](x, level)
        torch.testing.assert_close(mmdgs.from_pretrained(str(path), ema=ema)(x, level), expected.detach())


def test_the_size_of_celeba_is_known_by_its_levels(tmp_path: Path) -> None:
    sigmas = torch.logspace(numpy.log10(90.0), -2, 500).tolist()
    network = NCSNv2(3, width=2)
    path = write(tmp_path / "celeba.pth", public_format(network, network, sigmas))
    assert mmdgs.from_pretrained(path).shape == (3, 64, 64)
    assert mmdgs.from_pretrained(path, size=32).shape == (3, 32, 32)
    assert mmdgs.from_pretrained(write(path, public_format(network, network, sigmas[1:]))).shape == (3, 32, 32)


# --- NCSNv2: what is refused ------------------------------------------------------------------------------------


def changed(content: Content, where: int, **changes: object) -> Content:
    """The content with tensors of item `where` changed; None removes one. Dots are written as __."""
    found = list(content)
    state = dict(found[where]) | {key.replace("__", "."): value for key, value in changes.items()}
    found[where] = {key: value for key, value in state.items() if value is not None}
    return found


MISTAKES: dict[str, tuple[Callable[[Content], object], tuple[str, ...]]] = {
    "no average": (lambda c: c[:4], ("no moving average (EMA)", "ema=False")),
    "an empty average": (lambda c: [*c[:4], None], ("no moving average (EMA)", "ema=False")),
    "levels the wrong way": (
        lambda c: changed(c, 0, module__sigmas=torch.tensor(SIGMAS[::-1])),
        ("to the cleanest", "turn the list"),
    ),
    "equal levels": (lambda c: changed(c, 0, module__sigmas=torch.tensor([1.0, 1.0])), ("is not cleaner than 0",)),
    "a level of zero": (lambda c: changed(c, 0, module__sigmas=torch.tensor([1.0, 0.0])), ("sigma must be positive",)),
    "no level": (lambda c: changed(c, 0, module__sigmas=torch.zeros(0)), ("needs sigma",)),
    "no levels": (lambda c: changed(c, 0, module__sigmas=None), ("no NCSNv2 checkpoint", "sigmas")),
    "a tensor missing": (
        lambda c: changed(c, 4, end_conv__bias=None),
        ("another architecture than NCSNv2", "1 missing (such as end_conv.bias)"),
    ),
    "a deeper network": (
        lambda c: changed(c, 4, res31__0__conv1__weight=torch.zeros(1)),
        ("another architecture than NCSNv2", "1 unknown (such as res31.0.conv1.weight)"),
    ),
    "another width": (
        lambda c: changed(c, 4, begin_conv__weight=torch.zeros(5, 1, 3, 3)),
        ("another architecture than NCSNv2", "begin_conv.weight is (5, 1, 3, 3), expected (4, 1, 3, 3)"),
    ),
    "not finite": (
        lambda c: changed(c, 4, end_conv__bias=torch.tensor([float("nan")])),
        ("not finite, in end_conv.bias",),
    ),
    "another network": (lambda c: [{"conv.weight": torch.zeros(1)}], ("no NCSNv2 checkpoint", "begin_conv.weight")),
    "no tensors": (lambda c: [{"a": 1}], ("'a' is no tensor but int",)),
    "an empty list": (lambda c: [], ("no NCSNv2 checkpoint", "a list whose state has 0 tensors")),
    "a number": (lambda c: 5, ("expected a dictionary of tensors, got int",)),
    "a flat kernel": (lambda c: changed(c, 0, module__begin_conv__weight=torch.zeros(4)), ("no NCSNv2 checkpoint",)),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_checkpoints_that_are_refused(case, content: Content, tmp_path: Path) -> None:
    change, parts = case
    path = write(tmp_path / "checkpoint.pth", change(content))
    with refused(str(path), *parts):
        mmdgs.from_pretrained(path)
    result = CliRunner().invoke(cli.app, ["convert", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pth"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.pth", b"", ["a.pth is"]),
        ("a.pth", b"words, no pickle", ["a.pth is"]),
        ("a.pth", b"PK\x03\x04 no zip", ["a.pth is"]),
        ("a.pkl", b"", ["a.pkl is no checkpoint that can be read", ".pth, .pt, .ckpt", "give the module"]),
        ("a.safetensors", b"", ["a.safetensors is no checkpoint that can be read", "a folder"]),
    ],
    ids=["empty", "words", "zip", "pkl", "safetensors"],
)
def test_files_that_are_none(name: str, content: bytes, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(*parts):
        mmdgs.from_pretrained(tmp_path / name)


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.99])
def test_a_truncated_checkpoint(keep: float, checkpoint: Path) -> None:
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: int(keep * len(whole))])
    with refused("checkpoint.pth is"):
        mmdgs.from_pretrained(checkpoint)


@pytest.mark.parametrize("how", ["pickle", "old", "new"])
def test_a_pickle_with_code_is_refused_and_not_run(how: str, content: Content, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "checkpoint.pth"
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb must be a real one"
    marker.unlink()
    content[1] = Bomb(marker)
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "new")
    with refused("checkpoint.pth is refused, and nothing in it was run", "only a checkpoint of plain tensors"):
        mmdgs.from_pretrained(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("source", "options", "parts"),
    [
        ("nowhere.pth", {}, ["there is no checkpoint nowhere.pth"]),
        ("nowhere", {}, ["no model 'nowhere'", "no folder of this name here"]),
        ("mnist", {"ema": False}, ["ema=False is for NCSNv2", "'mnist'"]),
        ("mnist", {"size": 0}, ["size must be", "got 0"]),
        (3, {}, ["cannot make a model of a int"]),
        ("mnist", {"size": 32}, ["mnist says itself that it gives (1, 28, 28)"]),
    ],
)
def test_sources_that_are_none(source: object, options: dict[str, object], parts: list[str]) -> None:
    with refused(*parts):
        mmdgs.from_pretrained(source, **options)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with refused(str(tmp_path), "holds no model that is understood", "UNet2DModel"):
        mmdgs.from_pretrained(tmp_path)


# --- convert ----------------------------------------------------------------------------------------------------


def converted(*words: object) -> object:
    return CliRunner().invoke(cli.app, ["convert", *map(str, words)])


@pytest.mark.parametrize(("words", "ema"), [([], True), (["--raw"], False)])
def test_convert_writes_a_models_folder(words: list[str], ema: bool, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "model"
    result = converted(checkpoint, "--out", out, "--size", 8, *words)
    assert result.exit_code == 0, result.output
    assert f"model: {out}" in result.output
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    x, level = images(2, 1, 8, 8), NoiseLevel(sigma=1.0)
    expected, found = mmdgs.from_pretrained(checkpoint, ema=ema, size=8), mmdgs.load(out)
    assert torch.equal(found(x, level), expected(x, level))
    assert mmdgs.from_pretrained(out).digest == expected.digest
    assert found.levels == expected.levels
    assert found.config.shape == (1, 8, 8)
    assert found.card is not None
    assert "license" not in found.card
    assert ("moving average" in found.card) == ema


def test_convert_overwrites_only_models_and_only_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert converted(checkpoint, "--out", out).exit_code == 0
    before = (out / "model.safetensors").read_bytes()
    result = converted(checkpoint, "--out", out, "--raw")
    assert result.exit_code == 2
    assert "use --overwrite" in " ".join(result.output.split())
    assert (out / "model.safetensors").read_bytes() == before
    assert converted(checkpoint, "--out", out, "--raw", "--overwrite").exit_code == 0
    assert (out / "model.safetensors").read_bytes() != before
    config = (out / "config.json").read_bytes()
    (out / "config.json").unlink()
    result = converted(checkpoint, "--out", out, "--overwrite")
    assert "other things than a model" in " ".join(result.output.split())
    assert (out / "model.safetensors").exists()
    assert converted(checkpoint, "--out", checkpoint).exit_code == 2
    assert converted(tmp_path / "nowhere.pth", "--out", tmp_path / "b").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pth", "model"]
    (out / "config.json").write_bytes(config)
    result = converted(out, "--out", tmp_path / "b")
    assert "nothing needs converting" in " ".join(result.output.split())
    assert result.exit_code == 2


# --- EDM --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("level", [NoiseLevel(sigma=0.5), NoiseLevel(alpha=0.6, sigma=0.8)], ids=["plain", "scaled"])
def test_edm_is_exact_for_a_gaussian(level: NoiseLevel) -> None:
    found = mmdgs.from_pretrained(GaussianEdm())
    assert (found.shape, found.interval, found.source) == ((2, 4, 4), (-1.0, 1.0), "GaussianEdm")
    assert not found.network.training
    x_t = images(3, 2, 4, 4).double()
    m, s = 0.3, 0.7
    total = level.alpha**2 * s**2 + level.sigma**2
    q = mmdgs.DiagonalMoments(found, probes=None)(x_t, level)
    torch.testing.assert_close(q.mean, m + level.alpha * s**2 / total * (x_t - level.alpha * m), **EXACT)
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x_t, s**2 * level.sigma**2 / total), **EXACT)


def test_edms_levels_are_those_of_its_sampler() -> None:
    levels = mmdgs.from_pretrained(GaussianEdm()).levels
    assert len(levels) == 18
    # Karras et al. (2022), eq. 5 with rho = 7, 80 to 0.002: the second of 18 is 57.586.
    assert [round(levels[i].sigma, 3) for i in (0, 1, 17)] == [80.0, 57.586, 0.002]
    narrow = GaussianEdm()
    narrow.sigma_min, narrow.sigma_max = 0.01, 10.0
    levels = mmdgs.from_pretrained(narrow).levels
    assert (round(levels[0].sigma, 9), round(levels[-1].sigma, 9)) == (10.0, 0.01)


def test_a_function_will_do_and_labels_are_none() -> None:
    def network(x: Tensor, sigma: Tensor, labels: object) -> Tensor:
        assert labels is None
        return x / (1 + sigma**2)

    network.img_channels = 1
    found = mmdgs.from_pretrained(network, size=8)
    assert found.shape == (1, 8, 8)
    x = images(2, 1, 8, 8)
    torch.testing.assert_close(found(x, NoiseLevel(sigma=2.0)), x / 5)
    with refused("holds no weights"):
        _ = found.digest


def test_networks_that_are_not_edms() -> None:
    with refused("Linear is not called as net(x, sigma)", "mmdgs.score_denoiser"):
        mmdgs.from_pretrained(nn.Linear(1, 1, device="meta"))
    network = GaussianEdm()
    network.img_channels = None
    with refused("GaussianEdm does not say the shape of its images", "img_channels"):
        mmdgs.from_pretrained(network)
    network = GaussianEdm()
    network.sigma_min = 100.0
    with refused("sigma_min 100 and sigma_max 80"):
        mmdgs.from_pretrained(network)
    network = GaussianEdm()
    network.forward = lambda x, sigma: (x, sigma)
    with pytest.raises(ValueError, match="must return the denoised image"):
        mmdgs.from_pretrained(network)(images(1, 2, 4, 4), NoiseLevel(sigma=1.0))


# --- models of mmdgs --------------------------------------------------------------------------------------------


def many_levels(alphas: tuple[float, ...] = ()) -> Model:
    """A conditional U-Net with three levels."""
    options = preset("unet-tiny")[1] | {"conditional": True}
    return tiny_model("noise", options=options, sigma=None, sigmas=(0.9, 0.6, 0.3), alphas=alphas)


def test_a_model_is_a_denoiser_at_its_level_and_at_that_level_rescaled() -> None:
    model = tiny_model()
    found, x = mmdgs.from_pretrained(model), images(2, 1, 8, 8)
    assert (found.levels, found.shape, found.interval) == ((model.level,), (1, 8, 8), (0.0, 1.0))
    expected = model.denoiser_of(model.network)(x, model.level).detach()
    torch.testing.assert_close(found(x, model.level), expected)
    torch.testing.assert_close(found(0.4 * x, NoiseLevel(alpha=0.4, sigma=0.2)), expected)
    with refused("trained at NoiseLevel(alpha=1.0, sigma=0.5) alone", "got NoiseLevel(alpha=1.0, sigma=0.6)"):
        found(x, NoiseLevel(sigma=0.6))
    with refused("alone"):
        found(x, NoiseLevels.of([NoiseLevel(sigma=0.5), NoiseLevel(sigma=0.6)], x))


def test_between_levels_the_alpha_is_interpolated() -> None:
    model = many_levels((0.2, 0.8, 0.9))
    found, x = mmdgs.from_pretrained(model), images(1, 1, 8, 8)
    ratio = (0.9 / 0.2 * 0.6 / 0.8) ** 0.5  # half way between the first two, in log
    alpha = (0.2 * 0.8) ** 0.5
    expected = model.denoiser_of(model.network)(alpha * x, NoiseLevel(alpha=alpha, sigma=alpha * ratio))
    torch.testing.assert_close(found(x, NoiseLevel(sigma=ratio)), expected)


def test_models_by_name_by_folder_and_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_levels()
    folder = mmdgs.save(model, tmp_path / "someone")
    x, level = images(1, 1, 8, 8), model.levels[1]
    asked = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for found in (
        mmdgs.from_pretrained(folder),
        mmdgs.from_pretrained(tmp_path, subfolder="someone"),
        mmdgs.from_pretrained("some/one", subfolder="someone"),
    ):
        torch.testing.assert_close(found(x, level), model.denoiser_of(model.network)(x, level).detach())
    weights = ["README.md", "model.safetensors", "model-*-of-*.safetensors"]
    weights += ["isotropic.safetensors", "spectral.safetensors", "calibration-*.safetensors"]
    assert asked == [
        ("some/one", ["*.json"]),
        ("some/one", [f"someone/{name}" for name in weights]),
    ]
    digits = mmdgs.from_pretrained("mnist")
    assert (digits.shape, digits.source) == ((1, 28, 28), "mnist")
    assert mmdgs.from_pretrained(digits) is digits


def test_the_digest_is_of_the_weights() -> None:
    model, same = mmdgs.from_pretrained(tiny_model()), mmdgs.from_pretrained(tiny_model())
    assert model.digest == same.digest
    other = tiny_model()
    with torch.no_grad():
        next(other.network.parameters()).view(-1)[0] += 1
    assert mmdgs.from_pretrained(other).digest != model.digest
    assert mmdgs.from_pretrained(tiny_model(), dtype=torch.bfloat16).digest != model.digest


def test_device_and_dtype(checkpoint: Path) -> None:
    found = mmdgs.from_pretrained(checkpoint, dtype=torch.float64)
    assert found(images(1, 1, 8, 8).double(), found.levels[0]).dtype == torch.float64
    assert mmdgs.from_pretrained(checkpoint, device="meta").network.begin_conv.weight.is_meta
    assert found.to("meta") is found
    assert found.network.begin_conv.weight.is_meta


KINDS = {
    "a folder of ours": lambda path: mmdgs.save(many_levels(), path / "ours"),
    "a name that ships": lambda path: "mnist",
    "mean and std": lambda path: "mnist-kl",
    "a model": lambda path: many_levels(),
    "an NCSNv2 checkpoint": lambda path: write(path / "a.pth", public_format(NCSNv2(1, width=2), NCSNv2(1, width=2))),
    "an EDM network": lambda path: GaussianEdm().float(),
    "a folder of diffusers": lambda path: tiny_pipeline().save_pretrained(path / "pipeline") or path / "pipeline",
    "a pipeline": lambda path: tiny_pipeline(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_loaded_is_one_model(kind: str, tmp_path: Path) -> None:
    if "diffusers" in kind or "pipeline" in kind:
        pytest.importorskip("diffusers")
    model = mmdgs.load(KINDS[kind](tmp_path))
    assert isinstance(model, Model)
    level, x = model.levels[0], images(2, *model.shape)
    mean = model(x, level)
    assert mean.shape == x.shape
    q = model.posterior("diagonal", probes=2)(x, level, generator=seeded(0))
    torch.testing.assert_close(q.mean, mean.detach())
    assert model.posterior().denoiser(x, level).shape == x.shape
    assert re.fullmatch(r"Model\('.*', .*, \d+x\d+x\d+, .*, [\d.]+ million parameters\)", repr(model))
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
    assert torch.equal(learned.denoiser(x, model.level), q.mean)
    full = model.posterior("full")(x, model.level)
    torch.testing.assert_close(full.mean, q.mean.detach())


def test_a_closed_form_jacobian_is_the_models_too() -> None:
    config = ModelConfig("mlp", "energy", (2,), {"width": 8, "depth": 2}, sigmas=(0.9, 0.6), alphas=(0.2, 0.8))
    model = Model.build(config, seed=1)
    model.network.double()
    x, level = images(3, 2).double(), NoiseLevel(alpha=0.5, sigma=0.9)
    known = model.mean_and_jacobian(x, level)
    assert known is not None
    each = torch.autograd.functional.jacobian(lambda x_t: model(x_t, level).sum(0), x)  # (outputs, rows, inputs)
    torch.testing.assert_close(known[0], model(x, level).detach(), **EXACT)
    torch.testing.assert_close(known[1], each.transpose(0, 1), **EXACT)


def test_covariances_by_name() -> None:
    model = tiny_model()
    kinds = {
        "diagonal": mmdgs.DiagonalMoments(model, probes=3),
        "rademacher": mmdgs.DiagonalMoments(model, probes=3, design=mmdgs.Rademacher()),
        "lattice": mmdgs.DiagonalMoments(model, probes=3, design=mmdgs.Lattice()),
        "krylov": mmdgs.KrylovMoments(model, steps=20),
        "full": mmdgs.FullMoments(model),
    }
    for name, expected in kinds.items():
        assert model.posterior(name) == expected
    assert model.posterior() == kinds["diagonal"]
    assert model.posterior("krylov", krylov_steps=5) == mmdgs.KrylovMoments(model, steps=5)
    assert model.posterior("krylov", symmetric=True) == mmdgs.KrylovMoments(model, steps=20, symmetric=True)
    for name, options, parts in (
        ("diagnal", {}, ["unknown covariance 'diagnal' (did you mean 'diagonal'?)"]),
        ("full", {"probes": 3}, ["'full' takes no probes", "it takes most_products"]),
        ("diagonal", {"krylov_steps": 3}, ["'diagonal' takes no krylov_steps", "it takes probes"]),
        ("ocm", {}, ["needs its head"]),
        ("learned", {}, ["'energy' has no learned posterior"]),
        ("isotropic", {}, ["no isotropic variances are kept"]),
        ("spectral", {}, ["no spectral variances are kept"]),
    ):
        with refused(*parts):
            model.posterior(name, **options)


# --- any level --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ncsnv2", "edm", "conditional", "preserving"])
def any_level(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Model]:
    """Denoisers of every kind (diffusers': test_diffusion.py), in float64."""
    make = {
        "ncsnv2": lambda: checkpoint,
        "edm": GaussianEdm,
        "conditional": many_levels,
        "preserving": lambda: many_levels((0.1**0.5, 0.8, 0.91**0.5)),
    }
    return mmdgs.from_pretrained(make[request.param](), dtype=torch.float64)


LEVELS = [NoiseLevel(alpha=0.5, sigma=0.2), NoiseLevel(alpha=0.9, sigma=0.7), NoiseLevel(alpha=2.0, sigma=1.5)]


def test_what_is_no_batch_or_no_noise_is_refused(any_level: Model) -> None:
    with pytest.raises(ValueError, match="no denoising posterior at the clean level"):
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
    torch.testing.assert_close(any_level(x_t, NoiseLevels.of(LEVELS, x_t)), expected, rtol=1e-6, atol=1e-7)


TRAINED = [NoiseLevel(sigma=sigma) for sigma in (8.0, 4.0, 1.0)]


@pytest.mark.parametrize(
    ("sigma", "place"), [(8.0, 2), (4.0, 1), (1.0, 0), (2.0, 0.5), (8**0.5 * 2, 1.5), (4.0 * (1 + 1e-6), 1)]
)
def test_places_on_the_scale(sigma: float, place: float) -> None:
    scale = TrainedLevels(TRAINED)
    assert scale.place(NoiseLevel(alpha=0.3, sigma=0.3 * sigma)) == pytest.approx(place, abs=1e-12)
    rows = scale.place(NoiseLevels.of([NoiseLevel(alpha=0.3, sigma=0.3 * sigma)] * 2, torch.zeros(2, 3)))
    torch.testing.assert_close(rows, torch.full((2, 1), float(place), dtype=torch.float64), rtol=0, atol=1e-6)
    if place == int(place):
        assert (rows == place).all()


def test_outside_the_scale_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mmdgs")
    scale = TrainedLevels(TRAINED)
    assert scale.place(TRAINED[0]) == 2
    assert scale.place(NoiseLevel(alpha=3.0, sigma=3.0 * (1 + 1e-9))) == 0
    assert not caplog.records
    assert [scale.place(NoiseLevel(sigma=sigma)) for sigma in (100.0, 0.1, 100.0)] == [2, 0, 2]
    rows = NoiseLevels.of([NoiseLevel(sigma=100.0), NoiseLevel(sigma=0.1)], torch.zeros(2, 1))
    assert scale.place(rows).flatten().tolist() == [2, 0]
    assert len(caplog.records) == 1
    assert "100 lies outside what the network was trained at, 1 to 8" in caplog.text
    caplog.clear()
    TrainedLevels(TRAINED).place(rows)
    assert len(caplog.records) == 1


def test_a_configuration_of_ncsnv2_is_what_an_import_gives(checkpoint: Path) -> None:
    config = mmdgs.load(mmdgs.save(tiny_ncsnv2(), checkpoint.parent / "m")).config
    assert config == ModelConfig("ncsnv2", "score", (1, 8, 8), {"width": 4}, sigmas=tuple(SIGMAS))


def tiny_ncsnv2() -> Model:
    return Model.build(ModelConfig("ncsnv2", "score", (1, 8, 8), {"width": 4}, sigmas=tuple(SIGMAS)))
