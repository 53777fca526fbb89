"""Training at many noise levels: levels for rows, weightings by their formulas, draws, and exact
denoisers learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import lively, tiny_unet
from oracles import NETWORK_KINDS, exact_networks, paper_mixture, points
from torch import Tensor, nn

import mmdgs
from mmdgs import losses
from mmdgs.denoisers import denoise, score
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.losses import WEIGHTINGS
from mmdgs.models.config import DENOISERS, SquaredErrorEnergy
from mmdgs.networks import MLP, PerceptronHessian
from mmdgs.noise import NoiseLevel, NoiseLevels, add_noise
from mmdgs.randomness import Generator, Streams, seeded
from mmdgs.schedules import edm, geometric, variance_preserving_cosine, variance_preserving_linear
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train
from mmdgs.training.objective import DRAWS, jittered, level_draw

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
ROWS = [
    NoiseLevel(alpha=0.7, sigma=0.6),
    NoiseLevel(sigma=0.1),
    NoiseLevel(sigma=5.0),
    NoiseLevel(alpha=0.1, sigma=0.9),
]
Target = tuple[GaussianMixture, tuple[int, ...]]


def perceptron(outputs: int = 2) -> MLP:
    return lively(MLP(2, outputs, width=8, depth=2, conditional=True)).double()


def unet(outputs: int = 1) -> nn.Module:
    return tiny_unet(1, outputs, multipliers=[1], conditional=True).double()


NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (2,)),
    "unet": (unet, (1, 4, 4)),
}


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS.keys())
def conditional(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """A conditional network, and clean data for it: a row for each level of ROWS."""
    make, event = request.param
    return make(), torch.randn(len(ROWS), *event, generator=seeded(1), dtype=torch.float64)


@pytest.mark.parametrize("param", DENOISERS)
def test_a_level_for_each_row_is_the_loop_over_rows(
    param: str, conditional: tuple[nn.Module, Tensor]
) -> None:
    network, x = conditional
    denoiser = DENOISERS[param](network)
    levels = NoiseLevels.of(ROWS, x)
    alone = [denoiser(x[i : i + 1], level) for i, level in enumerate(ROWS)]
    # The U-Net embeds a level in single precision.
    torch.testing.assert_close(denoise(denoiser, x, levels), torch.cat(alone), rtol=1e-5, atol=1e-5)
    scores = [score(denoiser, x[i : i + 1], level) for i, level in enumerate(ROWS)]
    torch.testing.assert_close(score(denoiser, x, levels), torch.cat(scores), rtol=1e-5, atol=1e-4)
    # The level matters to the network, not to the formula alone.
    inside = SquaredErrorEnergy(network) if param == "energy-squared" else network
    assert (inside(x, levels) - inside(x, NoiseLevels.of(ROWS[::-1], x))).abs().max() > 1e-3


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_loss_of_rows_is_the_loop_over_rows(
    name: str, conditional: tuple[nn.Module, Tensor]
) -> None:
    network, x = conditional
    loss = partial(losses.dsm, mmdgs.noise_denoiser(network), weighting=WEIGHTINGS[name])
    assert_is_the_loop_over_rows(loss, x)


def assert_is_the_loop_over_rows(loss: Callable[..., Tensor], x: Tensor) -> None:
    together = loss(x, NoiseLevels.of(ROWS, x), generator=Streams(3, len(x)))
    alone = [
        loss(x[i : i + 1], level, generator=Streams(3, 1, first_row=i))
        for i, level in enumerate(ROWS)
    ]
    assert together.shape == (len(x),)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_kl_of_rows_is_the_loop_over_rows(name: str) -> None:
    make, event = NETWORKS[name]
    x = torch.randn(len(ROWS), *event, generator=seeded(1), dtype=torch.float64)
    learned = mmdgs.LearnedMoments(make(2 * event[0]))
    assert_is_the_loop_over_rows(partial(losses.kl, learned), x)


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_weightings_are_their_formulas(kind: str, target: Target, level: NoiseLevel) -> None:
    mixture, event = target
    x = mixture.sample((6,), generator=seeded(0)).reshape(6, *event)
    denoiser = exact_networks(mixture)[kind]
    x_t = add_noise(x, level, generator=seeded(3))
    e = (x_t - level.alpha * x) / level.sigma
    s, mean = mixture.noised(level).score(x_t), mixture.posterior(x_t, level).mean
    ratio = level.sigma / level.alpha
    expected = {
        "score": 0.5 * (s + e / level.sigma).square(),
        "ncsnv2": 0.5 * (level.sigma * s + e).square(),
        "noise": (-level.sigma * s - e).square(),
        "edm": (ratio**2 + 0.25) / (0.5 * ratio) ** 2 * (mean - x).square(),
    }
    assert expected.keys() == WEIGHTINGS.keys()
    for name, weighting in WEIGHTINGS.items():
        found = losses.dsm(denoiser, x, level, generator=seeded(3), weighting=weighting)
        torch.testing.assert_close(found, expected[name].flatten(1).sum(1), **TIGHT)


def test_a_preconditioned_network_has_the_error_of_its_own_target(
    conditional: tuple[nn.Module, Tensor],
) -> None:
    # Karras et al. (2022), table 1 and eq. 8, in y = x_t / alpha: lambda c_out^2 = 1.
    network, x = conditional
    levels = NoiseLevels.of(ROWS, x)
    e = torch.randn(x.shape, generator=seeded(3), dtype=torch.float64)
    r, d = levels.sigma / levels.alpha, 0.5
    skip, out, into = d**2 / (r**2 + d**2), r * d / (r**2 + d**2).sqrt(), 1 / (r**2 + d**2).sqrt()
    y = x + r * e
    raw = network(into * y, levels)
    denoiser = mmdgs.edm_denoiser(network)
    torch.testing.assert_close(denoiser(levels.alpha * y, levels), skip * y + out * raw, **TIGHT)
    found = losses.dsm(denoiser, x, levels, generator=seeded(3), weighting=losses.edm_weighting)
    torch.testing.assert_close(
        found, (raw - (x - skip * y) / out).flatten(1).square().sum(1), **TIGHT
    )


@pytest.mark.parametrize("level", ROWS, ids=str)
def test_preconditioning_alone_denoises_a_gaussian(level: NoiseLevel) -> None:
    # With data N(0, d^2) there is nothing left for the network to do.
    gaussian = GaussianMixture([1.0], torch.zeros(1, 3, dtype=torch.float64), 0.7)
    x_t = points(gaussian, (3,), level, rows=5)
    seen = []

    def zero(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)

    found = mmdgs.edm_denoiser(zero, data_std=0.7)(x_t, level)
    torch.testing.assert_close(found, gaussian.posterior(x_t, level).mean, **TIGHT)
    spread = math.sqrt(level.alpha**2 * 0.49 + level.sigma**2)
    torch.testing.assert_close(seen[0], x_t / spread, **TIGHT)  # of variance 1


def drawn(name: str, levels: tuple[NoiseLevel, ...], rows: int = 20_000) -> NoiseLevels:
    found = level_draw(levels, name)(torch.zeros(rows, 3, 1, dtype=torch.float64), Streams(5, rows))
    assert isinstance(found, NoiseLevels)
    assert found.alpha.shape == found.sigma.shape == (rows, 1, 1)
    return found


@pytest.mark.parametrize(
    "levels", [geometric(7, 5, 0.1), variance_preserving_linear(7)], ids=["VE", "VP"]
)
def test_the_uniform_draw_is_uniform_over_the_levels(levels: tuple[NoiseLevel, ...]) -> None:
    found = drawn("uniform", levels)
    pairs = list(zip(found.alpha.flatten().tolist(), found.sigma.flatten().tolist(), strict=True))
    counts = [pairs.count((level.alpha, level.sigma)) for level in levels]
    assert sum(counts) == 20_000
    expected = 20_000 / 7
    chi_squared = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_squared < 6 + 5 * math.sqrt(12)


@pytest.mark.parametrize(
    "levels", [geometric(7, 80, 0.002), variance_preserving_cosine()], ids=["VE", "VP"]
)
def test_the_lognormal_draw_is_edms(levels: tuple[NoiseLevel, ...]) -> None:
    found = drawn("lognormal", levels)
    logs = (found.sigma / found.alpha).log().flatten()
    error = 1.2 / math.sqrt(len(logs))
    assert abs(logs.mean() + 1.2) < 5 * error
    moved = drawn("lognormal:0.12", levels)
    assert abs((moved.sigma / moved.alpha).log().mean() - math.log(0.12)) < 5 * error
    assert abs(logs.std() - 1.2) < 5 * error / math.sqrt(2)
    total = found.alpha**2 + found.sigma**2 if levels[0].alpha < 1 else found.alpha
    torch.testing.assert_close(total, torch.ones_like(total), **TIGHT)


def test_the_mixed_draw_is_one_of_the_two_for_each_row() -> None:
    levels, rows = geometric(7, 50, 0.01), 20_000
    x, streams = torch.zeros(rows, 3, 1, dtype=torch.float64), Streams(5, rows)
    one, other = (level_draw(levels, name)(x, streams) for name in ("uniform", "lognormal"))
    found = drawn("mixed", levels)
    from_one = found.sigma == one.sigma
    assert (from_one | (found.sigma == other.sigma)).all()
    assert abs(from_one.double().mean() - 0.5) < 5 * 0.5 / math.sqrt(rows)
    assert torch.equal(found.alpha, torch.ones_like(found.alpha))
    # The levels above 5, which the log-normal draw all but leaves out: half of the two of seven (50
    # and 12).
    share = (found.sigma > 5).double().mean()
    expected = 0.5 * 2 / 7 + 0.5 * (other.sigma > 5).double().mean()
    assert abs(share - expected) < 5 * 0.4 / math.sqrt(rows)


@pytest.mark.parametrize("name", DRAWS)
def test_an_examples_level_is_from_its_own_stream(name: str) -> None:
    draw, x = level_draw(edm(18), name), torch.zeros(10, 2)
    whole, first, rest = Streams(0, 10), Streams(0, 4), Streams(0, 6, first_row=4)
    for _ in range(3):
        together = draw(x, whole)
        parts = [draw(x[:4], first), draw(x[4:], rest)]
        assert torch.equal(together.sigma, torch.cat([part.sigma for part in parts]))
    assert together.sigma.std() > 0


def test_what_a_denoiser_is_told_is_off_by_up_to_the_jitter() -> None:
    rows = 20_000
    x, level = torch.zeros(rows, 3, dtype=torch.float64), NoiseLevel(alpha=0.8, sigma=2.0)
    stated = jittered(level, 0.2, x, Streams(0, rows))
    logs = (stated.sigma / 2).log()
    assert torch.equal(stated.alpha, torch.full_like(stated.alpha, 0.8))
    assert -0.2 <= logs.min() < -0.199
    assert 0.199 < logs.max() <= 0.2
    assert abs(logs.mean()) < 5 * 0.2 / math.sqrt(3 * rows)
    rest = jittered(NoiseLevels.of([level] * 6, x[:6]), 0.2, x[:6], Streams(0, 6, first_row=4))
    assert torch.equal(stated.sigma[4:10], rest.sigma)  # from an example's own stream


def test_the_noise_is_the_levels_and_the_denoiser_hears_what_it_is_told() -> None:
    x, heard = torch.zeros(4, 3, dtype=torch.float64), []

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        heard.append(level)
        return x_t

    level, stated = NoiseLevel(sigma=2.0), NoiseLevel(sigma=1.5)
    found = losses.dsm(denoiser, x, level, generator=seeded(0), stated=stated)
    assert heard == [stated]
    torch.testing.assert_close(found, losses.dsm(denoiser, x, level, generator=seeded(0)), **TIGHT)


def test_a_conditional_perceptrons_jacobian_is_by_products() -> None:
    # Its layers have one input more: the closed form is of another function.
    network, x = perceptron(), torch.randn(3, 2, generator=seeded(0), dtype=torch.float64)
    assert PerceptronHessian.of(network) is None
    denoiser = mmdgs.energy_denoiser(network)
    mean, jacobian = mean_and_jacobian(denoiser, x, ROWS[0])
    assert mean.shape == x.shape
    exact = torch.autograd.functional.jacobian(lambda x: denoiser(x, ROWS[0]), x)
    torch.testing.assert_close(jacobian, torch.stack([exact[i, :, i] for i in range(3)]), **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("param", "weighting", "levels"),
    [
        ("edm", "edm", geometric(6, 20, 0.1)),
        ("velocity", "noise", variance_preserving_linear(6, 0.02, 0.5)),
    ],
    ids=["edm", "velocity"],
)
def test_training_recovers_the_denoiser_at_every_level(param: str, weighting: str, levels) -> None:
    # The excess of the loss over the least possible, lambda alpha^2 / (2 sigma^4) E |D - D*|^2:
    # 1,000 steps bring it from 0.4 to 1.6 in the mean over levels to 0.01 to 0.02.
    mixture = paper_mixture().to(dtype=torch.float32)
    network = MLP(2, 2, width=64, depth=3, conditional=True, seed=0)
    denoiser, weigh = DENOISERS[param](network), WEIGHTINGS[weighting]
    pick = level_draw(levels, "uniform")

    def excess(level: NoiseLevel) -> float:
        x_t = points(mixture, (2,), level, rows=4000, seed=1)
        with torch.no_grad():
            error = denoiser(x_t, level) - mixture.posterior(x_t, level).mean
        factor = weigh(level) * level.alpha**2 / (2 * level.sigma**4)
        return (factor * error.square().sum(1)).mean().item()

    def loss(x: Tensor, generator: Generator) -> Tensor:
        return losses.dsm(denoiser, x, pick(x, generator), generator=generator, weighting=weigh)

    before = [excess(level) for level in levels]
    data = mixture.sample((20_000,), generator=seeded(0))
    settings = TrainingSettings(steps=1000, batch_size=512, learning_rate=4e-3, decay=True)
    values = train(network, loss, data, settings, progress=None)
    after = [excess(level) for level in levels]
    assert sum(before) / len(before) > 0.3
    assert sum(after) < 0.05 * sum(before)
    assert max(after) < 0.1
    # The loss fell by about that much, from its first steps on.
    assert values[-100:].mean() < values[:10].mean() - 0.25
