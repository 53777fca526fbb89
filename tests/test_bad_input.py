"""What cannot be done is refused early, with what was got and what was expected."""

from __future__ import annotations

import math
import re

import pytest
import torch
from nets import tiny_model
from oracles import PLAIN, skewed_mixture
from torch import Tensor

import mmdgs
from mmdgs import metrics
from mmdgs.linalg.operators import Diagonal
from mmdgs.networks import MLP
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

NAN, INF = math.nan, math.inf
MEANS = torch.zeros(2, 3)
HALVES, EYES = [0.5, 0.5], torch.eye(3).repeat(2, 1, 1)
OK = torch.zeros(4, 2)


def refused(*parts: str):
    """A ValueError whose message holds all these parts, in order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, parts)))


# --- levels and targets


@pytest.mark.parametrize("value", [0.0, NAN, INF])
@pytest.mark.parametrize("name", ["alpha", "sigma"])
def test_levels(name: str, value: float) -> None:
    with refused(name, f"got {value}"):
        NoiseLevel(**{"alpha": 1.0, "sigma": 1.0, name: value})


MIXTURES = {
    "weights do not sum to one": (([0.5, 0.6], MEANS, 1.0), "weights", "0.6"),
    "negative weight": (([1.5, -0.5], MEANS, 1.0), "weights", "-0.5"),
    "no components": (([], torch.zeros(0, 3), 1.0), "means", "(0, 3)"),
    "means not finite": ((HALVES, MEANS + NAN, 1.0), "finite"),
    "negative deviation": ((HALVES, MEANS, [1.0, -2.0]), "deviations", "-2.0"),
    "covariance not a number": ((HALVES, MEANS, EYES * NAN), "finite"),
    "covariances of a wrong shape": ((HALVES, MEANS, torch.ones(3, 2)), "(2, 3, 3)", "(3, 2)"),
    "not symmetric": ((HALVES, MEANS, EYES + torch.eye(3)[[1, 2, 0]]), "symmetric"),
    "not positive definite": (
        (HALVES, MEANS, EYES - 2 * torch.diag(torch.eye(3)[0])),
        "positive definite",
        "-1",
    ),
}


@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES.keys())
def test_mixtures(case) -> None:
    arguments, *parts = case
    with refused(*parts):
        GaussianMixture(*arguments)


@pytest.mark.parametrize("method", ["score", "posterior"])
@pytest.mark.parametrize(
    ("x", "parts"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), ["3 numbers a point, got shape (2, 2)"]),
        (torch.zeros(2, 3), ["torch.float64", "but x is torch.float32", "mixture.to("]),
    ],
    ids=["dimension", "precision"],
)
def test_points_that_do_not_fit_the_mixture(method: str, x: Tensor, parts: list[str]) -> None:
    arguments = (x, PLAIN) if method == "posterior" else (x,)
    with refused(*parts):
        getattr(skewed_mixture(), method)(*arguments)


# --- posteriors


def standard() -> mmdgs.Gaussian:
    return mmdgs.Gaussian(torch.zeros(3, 2), Diagonal(torch.ones(3, 2)))


@pytest.mark.parametrize("shape", [(3, 3), (1, 2)])
def test_shapes_that_do_not_fit_the_posterior(shape: tuple[int, ...]) -> None:
    # Shapes that would broadcast are no less wrong.
    with refused(f"(3, 2), got {shape}"):
        standard().log_prob(torch.zeros(shape))
    with refused(f"(3, 2), got {shape}"):
        standard().bridge(torch.zeros(shape), NoiseLevel(sigma=1.0), NoiseLevel(sigma=0.5))


# --- estimators

ESTIMATORS = {
    "full": mmdgs.FullMoments,
    "diagonal": lambda den: mmdgs.DiagonalMoments(den, probes=None),
    "probes": lambda den: mmdgs.DiagonalMoments(den, probes=2),
    "krylov": mmdgs.KrylovMoments,
    "isotropic": lambda den: mmdgs.IsotropicMoments(den, LevelTable.of({PLAIN: 0.1})),
    "spectral": lambda den: mmdgs.SpectralMoments(
        den, LevelTable.of({PLAIN: torch.tensor([0.1, 0.2])})
    ),
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
        (torch.zeros(2, 0), ["batch (B, ...)", "got shape (2, 0)"]),
        (torch.zeros(3, 2, dtype=torch.int64), ["floating-point tensor, got torch.int64"]),
    ],
    ids=["no batch", "empty rows", "integers"],
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
    "a network of ours": (MLP(2, 2, width=4, depth=1, seed=0), "MLP is no denoiser"),
    "a function of x_t": (lambda x: x, "function is no denoiser"),
    "weights": ({"weight": OK}, "dict is no denoiser"),
}


@estimators
@pytest.mark.parametrize("case", NOT_DENOISERS.values(), ids=NOT_DENOISERS.keys())
def test_what_is_no_denoiser(make, case) -> None:
    given, message = case
    with pytest.raises(TypeError, match=f"{message}.*energy_denoiser"):
        make(given)


class Timed(torch.nn.Module):
    """A network that takes a time, as those of diffusion models do."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x * t.float()[:, None]


@estimators
@pytest.mark.parametrize(
    "wrap", [lambda network: network, mmdgs.noise_denoiser], ids=["raw", "wrapped"]
)
def test_a_network_that_takes_a_time(make, wrap) -> None:
    with pytest.raises(TypeError, match="NoiseLevel"):
        make(wrap(Timed()))(torch.zeros(4, 2), PLAIN, generator=seeded(0))


@estimators
@pytest.mark.parametrize("denoiser", DENOISERS.values(), ids=DENOISERS.keys())
def test_inputs_that_are_not_finite(make, denoiser: mmdgs.Denoiser) -> None:
    x_t = torch.zeros(4, 2)
    x_t[2, 1] = NAN
    with pytest.raises(mmdgs.NonFiniteError, match="input x_t is not finite at chain 2"):
        make(denoiser)(x_t, PLAIN, generator=seeded(0))


PIXELS = torch.linspace(0, 255, 2 * 64).reshape(2, 1, 8, 8)
ENTRIES = {
    "model": lambda model, x: model(x, model.level),
    "diagonal": lambda model, x: model.posterior()(x, model.level, generator=seeded(0)),
    "full": lambda model, x: model.posterior("full")(x, model.level),
    "krylov": lambda model, x: model.posterior(mmdgs.covariances.Krylov(steps=2))(x, model.level),
    "fit": lambda model, x: mmdgs.IsotropicMoments.fit(model, x, model.level, generator=seeded(0)),
}


@pytest.mark.parametrize("call", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0)])
def test_pixels_that_are_not_scaled(call, interval: tuple[float, float]) -> None:
    model = tiny_model("score", interval=interval)
    low, high = interval
    with refused("far outside", f"[{low:g}, {high:g}]", "model.scaled(pixels / 255)"):
        call(model, PIXELS)
    call(model, model.scaled(PIXELS / 255))
    call(model, 4 * model.scaled(PIXELS / 255))  # a chain may stray
    call(model, 300 * (PIXELS - PIXELS.mean()))  # or diverge: that is not about pixels


def test_a_full_covariance_by_name_has_a_limit_that_can_be_raised() -> None:
    model = tiny_model("score", shape=(1, 12, 12))
    x = torch.zeros(70, 1, 12, 12)
    with refused("10,080 products", "limit is 10,000", "--most-products 10080"):
        model.posterior("full")(x, model.level)
    with refused("take 144 products", "limit is 143"):
        model.posterior(mmdgs.covariances.Full(most_products=143))(x[:1], model.level)
    moments = model.posterior(mmdgs.covariances.Full(most_products=144))
    assert moments(x[:1], model.level).cov.dense().shape == (1, 144, 144)


def test_models_can_be_mapped_and_differentiated() -> None:
    # There no number can be looked at, so pixels are not refused.
    model, x = tiny_model("score"), torch.rand(3, 2, 1, 8, 8, generator=seeded(0))
    expected = torch.stack([model(one, model.level) for one in x])
    torch.testing.assert_close(torch.func.vmap(lambda one: model(one, model.level))(x), expected)
    mean, _ = torch.func.vjp(lambda one: model(one, model.level), x[0])
    torch.testing.assert_close(mean, expected[0])


@pytest.mark.parametrize("make", list(ESTIMATORS.values())[:3], ids=list(ESTIMATORS)[:3])
def test_denoisers_that_cannot_be_differentiated(make) -> None:
    moments = make(mmdgs.clean_denoiser(lambda x: x.detach()))
    with refused("not differentiable in x_t", "torch.no_grad()"):
        moments(torch.zeros(4, 2), PLAIN, generator=seeded(0))


@estimators
def test_a_network_in_another_precision(make) -> None:
    denoiser = mmdgs.score_denoiser(MLP(2, 2, width=4, depth=1, seed=0))
    with refused("torch.float32", "torch.float64"):
        make(denoiser)(torch.zeros(2, 2, dtype=torch.float64), PLAIN, generator=seeded(0))


@pytest.mark.parametrize(
    "network",
    [lambda x: x, lambda x: (x, x[:, :1]), lambda x: (x, x, x)],
    ids=["one part", "short deviation", "a triple"],
)
def test_learned_networks_of_a_wrong_shape(network) -> None:
    with refused("(mean, log_std)", "(4, 2)"):
        mmdgs.LearnedMoments(network)(torch.zeros(4, 2), PLAIN)


HALF = mmdgs.clean_denoiser(lambda x: 0.5 * x)


@pytest.mark.parametrize(
    ("denoiser", "data", "parts"),
    [
        (HALF, torch.zeros(0, 2), ["got shape (0, 2)"]),
        (HALF, torch.tensor([[0.0, NAN]]), ["not finite"]),
        (HALF, torch.zeros(3, 2, dtype=torch.int32), ["floating-point", "torch.int32"]),
        (
            mmdgs.clean_denoiser(lambda x: x + NAN),
            torch.zeros(3, 2),
            ["non-finite means", str(PLAIN)],
        ),
    ],
    ids=["empty", "not a number", "integers", "broken network"],
)
def test_data_to_fit_on(denoiser: mmdgs.Denoiser, data: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        mmdgs.IsotropicMoments.fit(denoiser, data, PLAIN, generator=seeded(0))


# --- chains


@pytest.mark.parametrize(
    ("x0", "parts"),
    [
        (torch.zeros(2), ["got shape (2,)"]),
        (torch.zeros(0, 2), ["got shape (0, 2)"]),
        (torch.zeros(1, 2, dtype=torch.int64), ["torch.int64"]),
        (torch.tensor([[0.0, NAN]]), ["x0", "not finite"]),
    ],
    ids=["no chains", "empty", "integers", "not a number"],
)
def test_starts_of_chains(x0: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        mmdgs.gibbs_chain(mmdgs.FullMoments(HALF), x0, PLAIN, steps=1)


# --- metrics


@pytest.mark.parametrize(
    ("a", "b", "parts"),
    [
        (torch.zeros(0, 2), OK, ["a must be floating-point points (n, d)", "(0, 2)"]),
        (OK, torch.zeros(4, 2, dtype=torch.int64), ["b must be floating-point", "torch.int64"]),
        (OK, OK + INF, ["b holds values that are not finite"]),
        (OK, torch.zeros(4, 3), ["match in dimension", "2", "3"]),
        (OK, OK.double(), ["dtype", "torch.float32", "torch.float64"]),
    ],
    ids=["empty", "integers", "infinite", "dimensions", "precisions"],
)
def test_points_for_mmd(a: Tensor, b: Tensor, parts: list[str]) -> None:
    with refused(*parts):
        metrics.mmd(a, b)


# --- training


@pytest.mark.parametrize(
    "data",
    [torch.zeros(0, 2), torch.zeros(4, 2, dtype=torch.int64), torch.tensor([[NAN, 0.0]])],
    ids=["empty", "integers", "not a number"],
)
def test_data_to_train_on(data: Tensor) -> None:
    network = MLP(2, 2, width=4, depth=1, seed=0)
    denoiser = mmdgs.score_denoiser(network)

    def loss(x: Tensor, g: torch.Generator) -> Tensor:
        return mmdgs.losses.dsm(denoiser, x, PLAIN, generator=g)

    with refused("finite", str(data.dtype), str(tuple(data.shape))):
        train(network, loss, data, TrainingSettings(steps=1), progress=None)
