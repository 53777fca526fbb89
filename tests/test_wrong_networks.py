"""Networks that are not the denoiser they are said to be, through the calls a user makes; and none
that are.
"""

from __future__ import annotations

import logging

import pytest
import torch
from shared import cifar10_test_images, needs_cifar10_files
from torch import Tensor, nn

import mmdgs
from mmdgs.targets import GaussianMixture

SHAPE, LEVEL = (1, 8, 8), mmdgs.NoiseLevel(0.25)


def law() -> GaussianMixture:
    """Three grey pictures in [0, 1] with variations: an image of 64 numbers whose posterior is
    known.
    """
    means = torch.rand(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return GaussianMixture([0.5, 0.3, 0.2], means, 0.1)


def images(n: int = 64, seed: int = 0) -> Tensor:
    return law().sample(n, generator=torch.Generator().manual_seed(seed)).reshape(n, *SHAPE)


def noisy(level: mmdgs.NoiseLevel = LEVEL, x: Tensor | None = None) -> Tensor:
    return mmdgs.add_noise(
        images() if x is None else x, level, generator=torch.Generator().manual_seed(2)
    )


class Noise(nn.Module):
    """The exact noise prediction of one level, at whatever level it is asked."""

    def __init__(self, level: mmdgs.NoiseLevel = LEVEL, dropout: float = 0.0) -> None:
        super().__init__()
        self.level, self.denoiser, self.drop = level, law().denoiser(), nn.Dropout(dropout)

    def forward(self, x_t: Tensor) -> Tensor:
        clean = self.denoiser(x_t.flatten(1), self.level).reshape(x_t.shape)
        return self.drop((x_t - self.level.alpha * clean) / self.level.sigma)


def clean_network(level: mmdgs.NoiseLevel = LEVEL) -> mmdgs.Denoiser:
    """The denoiser of a network that predicts the clean image of one level."""
    network = Noise(level)
    return mmdgs.clean_denoiser(lambda x_t: (x_t - level.sigma * network(x_t)) / level.alpha)


def score_network(x_t: Tensor) -> Tensor:
    return -Noise()(x_t) / LEVEL.sigma


ESTIMATORS = {
    "diagonal": lambda denoiser: mmdgs.DiagonalMoments(denoiser, probes=10),
    "exact diagonal": lambda denoiser: mmdgs.DiagonalMoments(denoiser, probes=None),
    "full": mmdgs.FullMoments,
    "krylov": mmdgs.KrylovMoments,
}


def posterior(
    denoiser: object, x_t: Tensor, level: mmdgs.NoiseLevel = LEVEL, name: str = "diagonal"
) -> mmdgs.Gaussian:
    return ESTIMATORS[name](denoiser)(x_t, level, generator=torch.Generator().manual_seed(3))


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    "level",
    [*map(mmdgs.NoiseLevel, (0.02, 0.25, 20.0)), mmdgs.NoiseLevel(alpha=0.1, sigma=0.02)],
    ids=str,
)
def test_right_networks_are_not_warned_of(name: str, level: mmdgs.NoiseLevel, caplog):
    denoiser = mmdgs.noise_denoiser(Noise(level))
    for _ in range(2):
        posterior(denoiser, noisy(level), level, name)
    mmdgs.calibrate(ESTIMATORS[name](denoiser), images(16), [level], progress=None)
    assert not logged(caplog)


@pytest.mark.parametrize("name", ["diagonal", "exact diagonal", "full"])
def test_predicted_noise_taken_for_the_clean_image_is_named(name: str, caplog):
    denoiser = mmdgs.clean_denoiser(Noise())
    for _ in range(3):
        posterior(denoiser, noisy(), name=name)
    (message,) = logged(caplog)  # once a denoiser
    assert "noise_denoiser, clean_denoiser" in message


def right() -> mmdgs.Denoiser:
    return mmdgs.noise_denoiser(Noise())


def detached() -> mmdgs.Denoiser:
    return mmdgs.noise_denoiser(lambda x_t: Noise()(x_t).detach() + 0 * x_t)


OTHER = mmdgs.NoiseLevel(0.5)
MISTAKES = {
    "clean network of another sigma": (clean_network, noisy(), OTHER, "trained at"),
    "noise network of another sigma": (right, noisy(), OTHER, "trained at"),
    "images without noise": (right, images(), LEVEL, "less noise than"),
    "pixels from 0 to 255": (right, noisy(x=255 * images()), LEVEL, "divide them by 255"),
    "the mean is x_t": (lambda: lambda x_t, level: 1.0 * x_t, noisy(), LEVEL, "x_t itself"),
    "no derivative": (detached, noisy(), LEVEL, "is not differentiated"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(mistake, caplog):
    denoiser, x_t, level, says = mistake
    posterior(denoiser(), x_t, level)
    (message,) = logged(caplog)
    assert says in message


@pytest.mark.parametrize(
    "wrap",
    [mmdgs.noise_denoiser, mmdgs.score_denoiser, mmdgs.velocity_denoiser, mmdgs.edm_denoiser],
)
def test_a_network_under_no_grad_is_refused(wrap):
    network = torch.no_grad()(Noise().forward)
    with pytest.raises(ValueError, match="autograd"):
        posterior(wrap(network), noisy())


class Holder:
    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, x_t: Tensor) -> Tensor:
        return self.network(x_t)


@pytest.mark.parametrize("way", ["module", "closure", "attribute"])
@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm2d(1)], ids=["dropout", "batch"])
def test_a_network_in_training_mode_is_refused(way: str, layer: nn.Module):
    network = nn.Sequential(layer).double().train()

    ways = {"module": network, "closure": lambda x_t, level: network(x_t)}
    ways["attribute"] = Holder(network)
    moments = mmdgs.DiagonalMoments(mmdgs.clean_denoiser(ways[way]), probes=2)
    for _ in range(2):  # not only the first time
        with torch.random.fork_rng(), pytest.raises(ValueError, match=r"network\.eval\(\)"):
            moments(noisy(), LEVEL, generator=torch.Generator().manual_seed(0))
    network.eval()
    moments(noisy(), LEVEL, generator=torch.Generator().manual_seed(0))


def chancy() -> mmdgs.Denoiser:
    network, g = clean_network(), torch.Generator().manual_seed(4)
    return mmdgs.clean_denoiser(
        lambda x_t: network(x_t, LEVEL) * (1 + 0.1 * torch.randn(x_t.shape, generator=g))
    )


def test_two_means_of_one_x_t_are_named(caplog):
    denoiser, x_t = chancy(), noisy()
    posterior(denoiser, x_t)
    posterior(denoiser, noisy(x=images(seed=5)))
    assert not logged(caplog)
    posterior(denoiser, x_t, name="krylov")
    (message,) = logged(caplog)
    assert "two means for the same x_t" in message


@pytest.mark.parametrize(
    ("denoiser", "level"),
    [
        (mmdgs.clean_denoiser(Noise()), LEVEL),
        (mmdgs.score_denoiser(score_network), mmdgs.NoiseLevel(0.5)),
    ],
    ids=["noise for clean", "another sigma"],
)
def test_calibrate_refuses_what_is_no_denoiser(denoiser, level: mmdgs.NoiseLevel):
    with pytest.raises(ValueError, match="farther from the clean data"):
        mmdgs.calibrate(mmdgs.DiagonalMoments(denoiser), images(), [level], progress=None)


@pytest.mark.parametrize("fit", [mmdgs.IsotropicMoments.fit, mmdgs.SpectralMoments.fit])
def test_fits_warn_of_what_is_no_denoiser(fit, caplog):
    for network, warned in ((mmdgs.clean_denoiser(Noise()), 1), (mmdgs.noise_denoiser(Noise()), 0)):
        caplog.clear()
        fit(network, images(), [LEVEL], generator=torch.Generator().manual_seed(0))
        assert sum("farther from the clean data" in message for message in logged(caplog)) == warned


def test_a_network_that_goes_on_training_may_change_its_means(caplog):
    network = nn.utils.skip_init(nn.Linear, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(0.5 * torch.eye(64))
        network.bias.zero_()
    denoiser = mmdgs.clean_denoiser(lambda x_t: network(x_t.flatten(1)).reshape(x_t.shape))
    x_t = noisy()
    posterior(denoiser, x_t)
    with torch.no_grad():
        network.weight.mul_(0.8)
    posterior(denoiser, x_t)
    assert not logged(caplog)


@pytest.mark.parametrize(
    ("denoiser", "level"),
    [
        (mmdgs.clean_denoiser(Noise(mmdgs.NoiseLevel(3.0))), mmdgs.NoiseLevel(3.0)),
        (clean_network(mmdgs.NoiseLevel(0.05)), OTHER),
    ],
    ids=["noise for clean", "another sigma"],
)
def test_calibrate_warns_of_what_a_linear_function_beats(denoiser, level: mmdgs.NoiseLevel, caplog):
    mmdgs.calibrate(mmdgs.DiagonalMoments(denoiser), images(), [level], progress=None)
    (message,) = logged(caplog)
    assert "than a linear function of x_t would be" in message


def test_a_number_in_place_of_a_level():
    with pytest.raises(ValueError, match=r"NoiseLevel.*0\.25"):
        mmdgs.FullMoments(mmdgs.noise_denoiser(Noise()))(noisy(), 0.25)


@needs_cifar10_files
@pytest.mark.parametrize("sigma", [50.0, 0.1])
def test_the_network_that_ships_is_not_warned_of(sigma: float, caplog):
    model, level = mmdgs.load("cifar10"), mmdgs.NoiseLevel(sigma)
    x_t = noisy(level, cifar10_test_images(1, 1)[0][:1].float() / 255)
    posterior(model, x_t, level)
    assert not [message for message in logged(caplog) if "raised to it" not in message]
