"""Large images part by part: the mean, the Jacobian and the posterior of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nets import lively
from toy_models import any_size_model

from mmdgs.errors import UsageError
from mmdgs.jacobians import linearised
from mmdgs.models.memory import bytes_kept
from mmdgs.models.parts import PartedDenoiser, part_side
from mmdgs.moments import SpectralMoments
from mmdgs.networks import ResidualUNet
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.operators import Box
from mmdgs.randomness import seeded
from mmdgs.restoration import checks
from mmdgs.restoration.draws import Restoration
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.uncertainty import tiles
from mmdgs.uncertainty.tiles import TiledDenoiser, fitted_denoiser

LEVEL = NoiseLevel(0.3)


@pytest.mark.parametrize(
    ("blocks", "reach"), [((1,), 4), ((1, 1), 11), ((2, 1), 15), ((1, 2, 1), 33)]
)
def test_the_reach_is_how_far_a_network_looks(blocks: tuple[int, ...], reach: int) -> None:
    """The farthest pixel on which one of the output depends, over all places of the pyramid."""
    network = lively(ResidualUNet(1, widths=(3,) * len(blocks), blocks=blocks)).double()
    assert network.reach == reach
    side, farthest = 2 * reach + 24, 0
    x = torch.rand(1, 1, side, side, generator=seeded(0), dtype=torch.float64).requires_grad_(True)
    y = network(x)
    for place in range(side // 2, side // 2 + network.multiple):
        (gradient,) = torch.autograd.grad(y[0, 0, place, place], x, retain_graph=True)
        seen = gradient[0, 0].abs().sum(1).nonzero().flatten()
        farthest = max(farthest, int((seen - place).abs().max()))
    assert farthest == reach


@pytest.mark.parametrize(("height", "width", "parts"), [(96, 120, 9), (61, 151, 4), (50, 51, 1)])
def test_parts_are_the_whole(height: int, width: int, parts: int) -> None:
    """Mean and products, of sizes that the pyramid divides and of others."""
    model = any_size_model()
    model.network.double()
    parted = PartedDenoiser(model, height, width, 64)
    assert parted.tiles == parts
    x = torch.rand(2, 3, height, width, generator=seeded(0), dtype=torch.float64)
    v = torch.randn(3, *x.shape, generator=seeded(1), dtype=torch.float64)
    whole = model.sized(height, width)
    torch.testing.assert_close(parted(x, LEVEL), whole(x, LEVEL))
    one, other = (linearised(denoiser, x, LEVEL) for denoiser in (parted, whole))
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.symmetric(v), other.symmetric(v))


def test_grey_images_go_in_parts_of_the_network_inside() -> None:
    model = any_size_model().grey()
    parted = PartedDenoiser(model, 96, 120, 64)
    x = torch.rand(1, 1, 96, 120, generator=seeded(0))
    assert part_side(model, 64**2) == 64
    assert parted.tiles == 9
    torch.testing.assert_close(parted(x, LEVEL), model(x, LEVEL), atol=1e-5, rtol=0)


def test_memory_says_how_large_the_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that fit; where margins would be most of them, tiles that overlap instead."""
    model = any_size_model()
    graph = tiles.GRAPH * bytes_kept(model)

    def denoiser(pixels: float) -> object:
        there = pixels * graph / tiles.NETWORK
        monkeypatch.setattr(tiles, "memory_of", lambda device: there)
        return fitted_denoiser(model, 900, 1200)

    assert not isinstance(denoiser(1200 * 900 + 1), PartedDenoiser | TiledDenoiser)
    large, small = denoiser(701**2), denoiser(45.5**2)
    assert isinstance(large, PartedDenoiser)
    assert isinstance(small, PartedDenoiser)
    assert (large.side, small.side) == (700, 44)
    assert isinstance(denoiser(43**2), TiledDenoiser)
    assert part_side(model, 4 * model.network.reach**2) is None


def test_an_image_of_another_size_is_refused() -> None:
    parted = PartedDenoiser(any_size_model(), 96, 120, 64)
    with pytest.raises(ValueError, match=r"96 x 120 images, got .*64, 64"):
        parted(torch.zeros(1, 3, 64, 64), LEVEL)


@pytest.mark.parametrize("covariance", ["spectral", "diagonal"])
def test_an_image_that_does_not_fit_is_restored_in_parts(
    covariance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the numbers of the whole; smaller ones beside it go whole, by the same estimator."""
    model, (height, width) = any_size_model(), (96, 120)
    spectrum = {level: torch.full((3, height, width), 0.1) for level in model.levels}
    spectral = SpectralMoments(model, LevelTable.of(spectrum))
    moments = spectral if covariance == "spectral" else model.posterior(covariance)
    operator = Box((3, height, width), 40)
    y = operator(torch.rand(1, 3, height, width, generator=seeded(0)))
    settings = RestorationSettings(0.1, covariance=moments, steps=3, draws=2)

    def restoration(side: int) -> Restoration:
        each = checks.FORWARD if covariance == "spectral" else checks.WITH_PRODUCTS
        memory = side**2 * each * bytes_kept(model) / checks.PART
        monkeypatch.setattr(checks, "memory_of", lambda device: memory)
        return Restoration.of(settings, model, y, operator)

    whole, parted = restoration(height + width), restoration(64)
    assert not isinstance(whole.moments.denoiser, PartedDenoiser)
    assert isinstance(parted.moments.denoiser, PartedDenoiser)
    assert parted.moments.denoiser.tiles == 9
    numbers = [work.draws(progress=None) for work in (whole, parted)]
    torch.testing.assert_close(numbers[0].draws, numbers[1].draws, atol=1e-4, rtol=0)
    assert numbers[0].cost == numbers[1].cost
    settings = replace(settings, covariance=parted.moments)
    assert Restoration.of(settings, model, y, operator).moments is parted.moments
    small, box = y[..., :16, :20], Box((3, 16, 20), 4)
    beside = Restoration.of(settings, model, small, box)
    assert not isinstance(beside.moments.denoiser, PartedDenoiser)
    assert beside.draws(progress=None).draws.isfinite().all()
    settings = replace(settings, covariance=moments)
    with pytest.raises(UsageError, match=r"120 x 96 pixels need about .* memory"):
        restoration(43)
