"""What cannot be done is refused early, with a message that says what was got and what was expected."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from nets import tiny_model
from oracles import PLAIN, paper_mixture, skewed_mixture
from torch import Tensor

import mmdgs
from mmdgs import metrics
from mmdgs.linalg.operators import Diagonal
from mmdgs.networks import MLP
from mmdgs.noise import CLEAN, LevelTable, NoiseLevel, add_noise
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

NAN, INF = math.nan, math.inf
MEANS = torch.zeros(2, 3)
OK = torch.zeros(4, 2)


def refused(*parts: str):
    """A ValueError whose message holds all these parts, in order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, parts)))


# --- levels and targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -0.2, NAN, INF, -INF])
@pytest.mark.parametrize("name", ["alpha", "sigma"])
def test_levels(name: str, value: float) -> None:
    with refused(f"{name} must be positive and finite, got {value}"):
        NoiseLevel(**{"alpha": 1.0, "sigma": 1.0, name: value})


MIXTURES = {
    "weights do not sum to one": (([0.5, 0.6], MEANS, 1.0), "2 non-negative numbers that sum to one", "0.6"),
    "negative weight": (([1.5, -0.5], MEANS, 1.0), "2 non-negative numbers that sum to one", "-0.5"),
    "weight not a number": (([NAN, 1.0], MEANS, 1.0), "2 non-negative numbers that sum to one", "nan"),
    "too many weights": (([0.5, 0.25, 0.25], MEANS, 1.0), "2 non-negative numbers that sum to one", "0.25, 0.25"),
    "means of one dimension": (([0.5, 0.5], torch.zeros(2), 1.0), "(components, dimensions), got shape (2,)"),
    "no components": (([], torch.zeros(0, 3), 1.0), "(components, dimensions), got shape (0, 3)"),
    "means not finite": (([0.5, 0.5], MEANS + NAN, 1.0), "must be finite"),
    "deviations of a wrong number": (([0.5, 0.5], MEANS, [1.0, 1.0, 1.0]), "one number or 2, got 3"),
    "negative deviation": (([0.5, 0.5], MEANS, [1.0, -2.0]), "standard deviations must be positive", "-2.0"),
    "deviation not a number": (([0.5, 0.5], MEANS, NAN), "standard deviations must be positive", "nan"),
    "covariance not a number": (([0.5, 0.5], MEANS, torch.eye(3).repeat(2, 1, 1) * NAN), "finite"),
    "infinite deviation": (([0.5, 0.5], MEANS, INF), "must be finite"),
    "covariances of a wrong shape": (
        ([0.5, 0.5], MEANS, torch.ones(3, 2)),
        "(2, 3, 3) matrices, (2, 3) variances or (2,) standard deviations, got shape (3, 2)",
    ),
    "negative variance": (([0.5, 0.5], MEANS, MEANS - 1), "positive definite; the smallest eigenvalue is -1"),
    "not symmetric": (
        ([0.5, 0.5], MEANS, torch.eye(3).repeat(2, 1, 1) + torch.eye(3)[[1, 2, 0]]),
        "must be symmetric",
    ),
    "not positive definite": (
        ([0.5, 0.5], MEANS, torch.eye(3).repeat(2, 1, 1) - 2 * torch.diag(torch.eye(3)[0])),
        "positive definite; the smallest eigenvalue is -1",
    ),
}


@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES.keys())
def test_mixtures(case) -> None:
    arguments, *parts = case
    with refused(*parts):
        GaussianMixture(*arguments)


@pytest.mark.parametrize("method", ["log_prob", "score", "posterior"])
@pytest.mark.parametrize(
    ("x", "parts"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), ["3 numbers a point, got shape (2, 2)"]),
        (torch.zeros(2, 3), ["torch.float64", "but x is torch.float32", "mixture.to("]),
        (torch.zeros(2, 3, dtype=torch.int64), ["torch.float64", "but x is torch.int64"]),
    ],
    ids=["dimension", "precision", "integers"],
)
def test_points_that_do_not_fit_the_mixture(method: str, x: Tensor, parts: list[str]) -> None:
    arguments = (x, PLAIN) if method == "posterior" else (x,)
    with refused(*parts):
        getattr(skewed_mixture(), method)(*arguments)


def test_posteriors_need_batches() -> None:
    with refused("x_t must be a batch (B, ...) of 3 numbers a row, got (3,)"):
        skewed_mixture().posterior(torch.zeros(3, dtype=torch.float64), PLAIN)
    posterior = skewed_mixture().posterior(torch.zeros(4, 3, dtype=torch.float64), PLAIN)
    with refused("the posterior's shape (4, 3), got (5, 3)"):
        posterior.log_prob(torch.zeros(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("generator", [seeded(0), mmdgs.Streams(0, 2)], ids=["generator", "streams"])
def test_integers_cannot_be_noised(generator, level: NoiseLevel) -> None:
    with refused("floating", "int64"):
        add_noise(torch.zeros(2, 3, dtype=torch.int64), level, generator=generator)


# --- posteriors -------------------------------------------------------------------------------------------------


def standard() -> mmdgs.Gaussian:
    return mmdgs.Gaussian(torch.zeros(3, 2), Diagonal(torch.ones(3, 2)))


@pytest.mark.parametrize("shape", [(3, 3), (1, 2), (3, 1), (2,)])
def test_shapes_that_do_not_fit_the_posterior(shape: tuple[int, ...]) -> None:
    # Shapes that would broadcast are no less wrong.
    with refused(f"(3, 2), got {shape}"):
        standard().log_prob(torch.zeros(shape))
    with refused(f"(3, 2), got {shape}"):
        standard().bridge(torch.zeros(shape), NoiseLevel(sigma=1.0), NoiseLevel(sigma=0.5))


# --- estimators -------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "full": mmdgs.FullMoments,
    "diagonal": lambda den: mmdgs.DiagonalMoments(den, probes=None),
    "probes": lambda den: mmdgs.DiagonalMoments(den, probes=2),
    "krylov": mmdgs.KrylovMoments,
    "isotropic": lambda den: mmdgs.IsotropicMoments(den, LevelTable.of({PLAIN: 0.1})),
    "spectral": lambda den: mmdgs.SpectralMoments(den, LevelTable.of({PLAIN: torch.tensor([0.1, 0.2])})),
}
estimators = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS.keys())
DENOISERS = {
    "plain": mmdgs.clean_denoiser(lambda x: 0.5 * x),
    "closed form": mmdgs.energy_denoiser(MLP(2, 1, width=4, depth=1, seed=0)),
}


@estimators
@pytest.mark.parametrize("denoiser", DENOISERS.values(), ids=DENOISERS.keys())
@pytest.mark.parametrize(
    ("x_t", "parts"),
    [
        (torch.zeros(2), ["batch (B, ...)", "got shape (2,)"]),
        (torch.zeros(0, 2), ["batch (B, ...)", "got shape (0, 2)"]),
        (torch.zeros(2, 0), ["batch (B, ...)", "got shape (2, 0)"]),
        (torch.zeros(3, 2, dtype=torch.int64), ["floating-point tensor, got torch.int64"]),
    ],
    ids=["no batch", "empty batch", "empty rows", "integers"],
)
def test_what_is_not_a_batch(make, denoiser: mmdgs.Denoiser, x_t: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        make(denoiser)(x_t, PLAIN, generator=seeded(0))


@estimators
@pytest.mark.parametrize("columns", [1, 3], ids=["would broadcast", "would not"])
def test_denoisers_of_a_wrong_shape(make, columns: int) -> None:
    # A denoiser of one's own, not made by an adapter that checks.
    def wrong(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return x_t[:, :1].expand(-1, columns) + 0.0

    with refused("(4, 2)", f"got (4, {columns})"):
        make(wrong)(torch.zeros(4, 2), PLAIN, generator=seeded(0))


NOT_DENOISERS = {
    "a network of ours": (MLP(2, 2, width=4, depth=1, seed=0), "MLP is no denoiser D(x_t, level): it is a network"),
    "a network of torch": (
        torch.nn.Linear(2, 2),
        "Linear is no denoiser D(x_t, level): it cannot be called with x_t",
    ),
    "a function of x_t": (
        lambda x: x,
        "function is no denoiser D(x_t, level): it cannot be called with x_t",
    ),
    "weights": ({"weight": OK}, "dict is no denoiser D(x_t, level): it cannot be called"),
}


@estimators
@pytest.mark.parametrize("case", NOT_DENOISERS.values(), ids=NOT_DENOISERS.keys())
def test_what_is_no_denoiser(make, case) -> None:
    given, message = case
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        make(given)
    assert "mmdgs.energy_denoiser(network), score_denoiser, noise_denoiser" in str(caught.value)


class Timed(torch.nn.Module):
    """A network that takes a time, as those of diffusion models do."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x * t.float()[:, None]


@estimators
@pytest.mark.parametrize("wrap", [lambda network: network, mmdgs.noise_denoiser], ids=["raw", "wrapped"])
def test_a_network_that_takes_a_time(make, wrap) -> None:
    with pytest.raises(TypeError, match=r"'NoiseLevel' object has no attribute 'float'.*lambda x_t, level: network"):
        make(wrap(Timed()))(torch.zeros(4, 2), PLAIN, generator=seeded(0))


@estimators
def test_a_denoiser_that_returns_no_tensor(make) -> None:
    with refused("the denoiser must return a torch tensor, got tuple"):
        make(lambda x_t, level: (x_t, x_t))(torch.zeros(4, 2), PLAIN, generator=seeded(0))


@estimators
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("denoiser", DENOISERS.values(), ids=DENOISERS.keys())
def test_inputs_that_are_not_finite(make, denoiser: mmdgs.Denoiser, value: float) -> None:
    x_t = torch.zeros(4, 2)
    x_t[2, 1] = value
    with pytest.raises(mmdgs.NonFiniteError, match="the input x_t is not finite at chain 2; check the data that"):
        make(denoiser)(x_t, PLAIN, generator=seeded(0))


def test_large_inputs_are_finite() -> None:
    x_t = torch.full((4, 2), 1e30)  # whose squares are not
    assert mmdgs.FullMoments(DENOISERS["plain"])(x_t, PLAIN).mean.isfinite().all()


PIXELS = torch.linspace(0, 255, 2 * 64).reshape(2, 1, 8, 8)
ENTRIES = {
    "model": lambda model, x: model(x, model.level),
    "diagonal": lambda model, x: model.posterior()(x, model.level, generator=seeded(0)),
    "full": lambda model, x: model.posterior("full")(x, model.level),
    "krylov": lambda model, x: model.posterior("krylov", krylov_steps=2)(x, model.level),
    "fit": lambda model, x: mmdgs.IsotropicMoments.fit(model, x, model.level, generator=seeded(0)),
}


@pytest.mark.parametrize("call", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0)])
def test_pixels_that_are_not_scaled(call, interval: tuple[float, float]) -> None:
    model = tiny_model("score", interval=interval)
    low, high = interval
    with refused("x_t lies far outside the model's data", f"[{low:g}, {high:g}]", "x = model.scaled(pixels / 255)"):
        call(model, PIXELS)
    call(model, model.scaled(PIXELS / 255))
    call(model, 4 * model.scaled(PIXELS / 255))  # a chain may stray
    call(model, 300 * (PIXELS - PIXELS.mean()))  # or diverge: that is not about pixels


def test_a_full_covariance_by_name_has_a_limit_that_can_be_raised() -> None:
    model = tiny_model("score", shape=(1, 12, 12))
    x = torch.zeros(70, 1, 12, 12)
    with refused("take 10,080 products", "limit is 10,000", "--covariance krylov", "--most-products 10080"):
        model.posterior("full")(x, model.level)
    with refused("take 144 products", "limit is 143"):
        model.posterior("full", most_products=143)(x[:1], model.level)
    assert model.posterior("full", most_products=144)(x[:1], model.level).cov.dense().shape == (1, 144, 144)


def test_models_can_be_mapped_and_differentiated() -> None:
    # There no number can be looked at, so pixels are not refused.
    model, x = tiny_model("score"), torch.rand(3, 2, 1, 8, 8, generator=seeded(0))
    expected = torch.stack([model(one, model.level) for one in x])
    torch.testing.assert_close(torch.func.vmap(lambda one: model(one, model.level))(x), expected)
    mean, _ = torch.func.vjp(lambda one: model(one, model.level), x[0])
    torch.testing.assert_close(mean, expected[0])


def test_points_may_lie_anywhere() -> None:
    config = dataclasses.replace(tiny_model("score").config, network="mlp", shape=(2,), options={"width": 4})
    model = mmdgs.Model.build(config)
    assert model(torch.full((3, 2), 1e3), model.level).shape == (3, 2)


def test_losses_of_a_denoiser_of_a_wrong_shape() -> None:
    with refused("(4, 2)", "(4, 1)"):
        mmdgs.losses.dsm(lambda x_t, level: x_t[:, :1], torch.zeros(4, 2), PLAIN, generator=seeded(0))


@pytest.mark.parametrize("make", list(ESTIMATORS.values())[:3], ids=list(ESTIMATORS)[:3])
def test_denoisers_that_cannot_be_differentiated(make) -> None:
    with refused("not differentiable in x_t", "torch.no_grad()"):
        make(mmdgs.clean_denoiser(lambda x: x.detach()))(torch.zeros(4, 2), PLAIN, generator=seeded(0))


@estimators
def test_a_network_in_another_precision(make) -> None:
    denoiser = mmdgs.score_denoiser(MLP(2, 2, width=4, depth=1, seed=0))
    with refused("the network is torch.float32 on cpu but x_t is torch.float64 on cpu; convert one"):
        make(denoiser)(torch.zeros(2, 2, dtype=torch.float64), PLAIN, generator=seeded(0))


@pytest.mark.parametrize(
    ("network", "got"),
    [
        (lambda x: x, "got (4, 2)"),
        (lambda x: torch.cat([x, x, x], dim=1), "got (4, 6)"),
        (lambda x: torch.stack([x, x]), "got (2, 4, 2)"),
        (lambda x: (x, x[:, :1]), "got [(4, 2), (4, 1)]"),
        (lambda x: (x, x, x), "got [(4, 2), (4, 2), (4, 2)]"),
    ],
    ids=["one part", "three parts", "stacked", "short deviation", "a triple"],
)
def test_learned_networks_of_a_wrong_shape(network, got: str) -> None:
    with refused("(mean, log_std), each of shape (4, 2), or both along dimension 1", got):
        mmdgs.LearnedMoments(network)(torch.zeros(4, 2), PLAIN)


@pytest.mark.parametrize("probes", [0, -3])
def test_numbers_of_probes(probes: int) -> None:
    with refused(f"probes must be a positive number, or None for the exact diagonal, got {probes}"):
        mmdgs.DiagonalMoments(paper_mixture().denoiser(), probes=probes)


def test_probes_need_a_generator() -> None:
    with pytest.raises(TypeError, match=r"needs generator=; or use probes=None"):
        mmdgs.DiagonalMoments(paper_mixture().denoiser(), probes=1)(torch.zeros(1, 2, dtype=torch.float64), PLAIN)


@pytest.mark.parametrize("name", ["isotropic", "spectral"])
@pytest.mark.parametrize(("given", "got"), [((), "none"), ((0.1,), "float")], ids=["left out", "a number"])
def test_variances_that_were_not_fitted(name: str, given: tuple[float, ...], got: str) -> None:
    kind = {"isotropic": mmdgs.IsotropicMoments, "spectral": mmdgs.SpectralMoments}[name]
    with pytest.raises(TypeError, match=f"{kind.__name__} needs its variances, a LevelTable, and got {got}") as caught:
        kind(HALF, *given)
    said = str(caught.value)
    assert f"model.posterior('{name}')" in said
    # The line of code that it names does fit them.
    code = said[said.index(f"{kind.__name__}.fit(") :].split(". ")[0]
    names = {"denoiser": HALF, "x": torch.randn(9, 1, 2, 2, generator=seeded(0)), "levels": [PLAIN], "torch": torch}
    assert isinstance(eval(code, names | {kind.__name__: kind}), kind)


HALF = mmdgs.clean_denoiser(lambda x: 0.5 * x)


@pytest.mark.parametrize(
    ("denoiser", "data", "parts"),
    [
        (HALF, torch.zeros(0, 2), ["got shape (0, 2)"]),
        (HALF, torch.tensor([[0.0, NAN]]), ["not finite"]),
        (HALF, torch.tensor([[0.0, INF]]), ["not finite"]),
        (HALF, torch.zeros(3, 2, dtype=torch.int32), ["floating-point", "torch.int32"]),
        (mmdgs.clean_denoiser(lambda x: x + NAN), torch.zeros(3, 2), [str(PLAIN), "nan", "non-finite means"]),
    ],
    ids=["empty", "not a number", "infinite", "integers", "broken network"],
)
def test_data_to_fit_on(denoiser: mmdgs.Denoiser, data: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        mmdgs.IsotropicMoments.fit(denoiser, data, PLAIN, generator=seeded(0))


# --- chains -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x0", "parts"),
    [
        (torch.zeros(2), ["got shape (2,)"]),
        (torch.zeros(0, 2), ["got shape (0, 2)"]),
        (torch.zeros(1, 2, dtype=torch.int64), ["torch.int64"]),
        (torch.tensor([[0.0, NAN]]), ["x0", "not finite"]),
        (torch.tensor([[0.0, INF]]), ["x0", "not finite"]),
    ],
    ids=["no chains", "empty", "integers", "not a number", "infinite"],
)
def test_starts_of_chains(x0: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        mmdgs.gibbs_chain(mmdgs.FullMoments(HALF), x0, PLAIN, steps=1)


def test_a_clean_level_cannot_be_sampled_at() -> None:
    with refused("wrong order"):
        mmdgs.gibbs_chain(mmdgs.FullMoments(HALF), torch.zeros(1, 2), CLEAN, steps=1)


# --- metrics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "parts"),
    [
        (torch.zeros(0, 2), OK, ["a must be floating-point points (n, d)", "(0, 2)"]),
        (OK, torch.zeros(4), ["b must be floating-point points (n, d)", "(4,)"]),
        (OK, torch.zeros(4, 2, dtype=torch.int64), ["b must be floating-point", "torch.int64"]),
        (OK + NAN, OK, ["a holds values that are not finite"]),
        (OK, OK + INF, ["b holds values that are not finite"]),
        (OK, torch.zeros(4, 3), ["match in dimension", "(4, 2)", "(4, 3)"]),
        (OK, OK.double(), ["dtype", "torch.float32", "torch.float64"]),
    ],
    ids=["empty", "no dimension", "integers", "not a number", "infinite", "dimensions", "precisions"],
)
def test_points_for_mmd(a: Tensor, b: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        metrics.mmd(a, b)


@pytest.mark.parametrize(
    ("bandwidths", "parts"),
    [
        ("median", ["'mean-distance' or a sequence of numbers, got 'median'"]),
        ([], ["positive numbers, got []"]),
        ([1.0, 0.0], ["positive numbers, got [1.0, 0.0]"]),
        ([NAN], ["positive numbers, got [nan]"]),
    ],
    ids=["unknown", "none", "zero", "not a number"],
)
def test_bandwidths(bandwidths, parts: list[str]) -> None:
    with refused(*parts):
        metrics.mmd(OK, OK + torch.arange(4.0)[:, None], bandwidths)


def test_short_chains() -> None:
    with refused("at least 4 steps, got 3"):
        metrics.effective_sample_size(torch.zeros(3, 1, 1))


@pytest.mark.parametrize("log_p", [[-1.0, -1.0], [NAN, 0.0]], ids=["too small a grid", "not a number"])
def test_grids_that_do_not_hold_the_density(log_p: list[float]) -> None:
    mass = sum(map(math.exp, log_p))
    with refused("the grid must hold the whole of p", f"{mass:.4f}"):
        metrics.kl_divergence(torch.tensor(log_p), torch.zeros(2), 1.0)


# --- training ---------------------------------------------------------------------------------------------------


def train_on(data: Tensor, settings: TrainingSettings) -> None:
    network = MLP(2, 2, width=4, depth=1, seed=0)
    denoiser = mmdgs.score_denoiser(network)
    train(network, lambda x, g: mmdgs.losses.dsm(denoiser, x, PLAIN, generator=g), data, settings, progress=None)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(0, 2), torch.zeros(4, 2, dtype=torch.int64), torch.tensor([[NAN, 0.0]]), torch.tensor([[INF, 0.0]])],
    ids=["empty", "integers", "not a number", "infinite"],
)
def test_data_to_train_on(data: Tensor) -> None:
    with refused("non-empty, floating point and finite", str(data.dtype), str(tuple(data.shape))):
        train_on(data, TrainingSettings(steps=1))


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("steps", -1), ("batch_size", 0), ("learning_rate", 0.0), ("learning_rate", NAN)]
)
def test_training_settings(name: str, value: float) -> None:
    with refused(f"{name} must be positive and finite, got {value}"):
        TrainingSettings(**{name: value})


def test_a_training_that_blows_up_says_where() -> None:
    with pytest.raises(mmdgs.NonFiniteError, match=r"the training loss is not finite at step \d+") as caught:
        train_on(torch.full((4, 2), 1e30), TrainingSettings(steps=3))
    assert caught.value.step == 0
    assert "chain" not in str(caught.value), "a training has no chains"


POINTS = torch.zeros(3, 2)
LEVEL = mmdgs.NoiseLevel(sigma=0.5)
MIX = mmdgs.data.mog_density()
MISTAKES = {
    "numpy x_t": (lambda: mmdgs.FullMoments(MIX.denoiser())(POINTS.numpy(), LEVEL), "need a torch tensor, got ndarray"),
    "numpy points": (lambda: MIX.log_prob(POINTS.numpy()), "x must be a torch tensor, got ndarray"),
    "numpy samples": (lambda: mmdgs.metrics.mmd(POINTS.numpy(), POINTS), "a must be a torch tensor, got ndarray"),
    "one bandwidth": (lambda: mmdgs.metrics.mmd(POINTS, POINTS, bandwidths=1.0), "a sequence of numbers, got 1.0"),
    "no sigma": (lambda: mmdgs.NoiseLevel(sigma=None), "sigma must be a positive number, got None"),
    "half a probe": (lambda: mmdgs.DiagonalMoments(MIX.denoiser(), probes=1.5), "probes must be a positive number"),
    "no noise": (lambda: mmdgs.FullMoments(MIX.denoiser())(POINTS, mmdgs.CLEAN), "no denoising posterior at the clean"),
    "no batch": (lambda: mmdgs.ExactMoments(MIX)(torch.zeros(0, 2), LEVEL), "at least one number a row"),
    "no output": (
        lambda: mmdgs.score_denoiser(lambda x: None)(POINTS, LEVEL),
        "must return a torch tensor, got NoneType",
    ),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_common_mistakes_are_named(case) -> None:
    work, message = case
    with refused(message):
        work()


def test_a_seed_that_is_none() -> None:
    with pytest.raises(TypeError, match="seed must be an integer or one per chain, got None"):
        mmdgs.gibbs_chain(mmdgs.ExactMoments(MIX), POINTS, LEVEL, steps=1, seed=None, progress=None)
