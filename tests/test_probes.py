"""Probes of the diagonal: what lattices keep apart, what is exact, what is unbiased, and what filtering does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mmdgs
from mmdgs import probes
from mmdgs.noise import NoiseLevel
from mmdgs.probes import Lattice, Rademacher, pixel_classes
from mmdgs.randomness import Streams, seeded

LEVEL = NoiseLevel(sigma=0.5)
SHAPE = (3, 9, 10)


def linear(matrix: Tensor) -> mmdgs.Denoiser:
    """x -> J x, J (d, d) the same for every row."""

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return (x_t.flatten(1) @ matrix.mT).reshape(x_t.shape)

    return denoiser


def diagonal(matrix: Tensor, design: probes.ProbeDesign, count: int, seed: int = 0, rows: int = 1) -> Tensor:
    """The estimated diagonal of J, (rows, d), without the floor."""
    x_t = torch.zeros(rows, *SHAPE, dtype=torch.float64)
    moments = mmdgs.DiagonalMoments(linear(matrix), probes=count, floor=-math.inf, design=design)
    q = moments(x_t, LEVEL, generator=Streams(seed, rows))
    return q.cov.diagonal().flatten(1) / LEVEL.tweedie


def random_matrix(seed: int = 0) -> Tensor:
    d = math.prod(SHAPE)
    return torch.randn(d, d, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
def test_five_classes_keep_a_pixel_apart_from_its_neighbours_and_its_other_channels(channels: int) -> None:
    place = pixel_classes(5, channels, 12, 12)
    assert sorted(place.unique().tolist()) == list(range(5))
    assert (place[:, 1:] != place[:, :-1]).all()  # above and below
    assert (place[:, :, 1:] != place[:, :, :-1]).all()  # left and right
    if channels == 1:
        assert (place[:, 1:, 1:] != place[:, :-1, :-1]).all()
        assert (place[:, 1:, :-1] != place[:, :-1, 1:]).all()
    for one in range(channels):
        for other in range(one):
            assert (place[one] != place[other]).all()


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 10, 48])
def test_every_number_is_hit_as_often_as_any_other(count: int) -> None:
    v = Lattice().draw(count, torch.zeros(2, *SHAPE), Streams(0, 2))
    assert v.shape == (count, 2, *SHAPE)
    hits = (v != 0).sum(0)
    assert (hits == hits[0, 0, 0, 0]).all()
    assert set(v.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_a_local_jacobian_has_its_diagonal_exactly_from_few_products() -> None:
    """A different 3 x 3 kernel at every pixel, channels apart: no two pixels of a class see each other."""
    d = math.prod(SHAPE)
    basis = torch.eye(d, dtype=torch.float64).reshape(d, *SHAPE)
    kernel = torch.randn(3, 1, 3, 3, generator=seeded(1), dtype=torch.float64)
    near = functional.conv2d(basis, kernel, padding=1, groups=3).flatten(1) != 0
    matrix = torch.where(near, random_matrix(), 0.0)
    # In three channels a class of five holds diagonal neighbours; thirteen hold none.
    found = diagonal(matrix, Lattice(smooth=False), 13)
    assert torch.allclose(found[0], matrix.diagonal(), atol=1e-12)
    rough = diagonal(matrix, Rademacher(), 13)
    assert (rough[0] - matrix.diagonal()).norm() > 0.3 * matrix.diagonal().norm()


@pytest.mark.parametrize("count", [5, 10, 96])
def test_without_the_filter_the_estimate_is_unbiased_with_the_stated_variance(count: int) -> None:
    matrix = random_matrix()
    found = diagonal(matrix, Lattice(smooth=False), count, rows=4_000)
    classes, rounds = probes._classes_and_rounds(count)
    place = pixel_classes(classes, *SHAPE).flatten()
    same = (place[:, None] == place[None, :]).double().fill_diagonal_(0)
    variance = (matrix.square() * same).sum(0) / rounds
    error = (found.mean(0) - matrix.diagonal()) / (variance / len(found)).sqrt()
    assert error.abs().max() < 5
    assert torch.allclose(found.var(0), variance, rtol=0.2)


def test_the_default_is_the_papers() -> None:
    """The mean of v * (v' J) over signs, number for number."""
    matrix = random_matrix()
    v = mmdgs.randomness.signs((1, 4, *SHAPE), matrix, Streams(3, 1))[0].flatten(1)
    by_hand = (v * (v @ matrix)).mean(0)
    x_t = torch.zeros(1, *SHAPE, dtype=torch.float64)
    moments = mmdgs.DiagonalMoments(linear(matrix), probes=4, floor=-math.inf)
    found = moments(x_t, LEVEL, generator=Streams(3, 1)).cov.diagonal().flatten() / LEVEL.tweedie
    assert torch.allclose(found, by_hand, atol=1e-10)


def test_filtering_brings_a_smooth_diagonal_nearer_and_leaves_a_sharp_one() -> None:
    i = torch.linspace(0, 3, SHAPE[1], dtype=torch.float64)[:, None]
    smooth = (2 + torch.sin(i)).expand(SHAPE).flatten()
    noise = 0.15 * random_matrix()
    matrix = noise - torch.diag(noise.diagonal()) + torch.diag(smooth)
    errors = [
        (diagonal(matrix, Lattice(smooth=filtering), 5, rows=50) - smooth).norm(dim=1).mean().item()
        for filtering in (False, True)
    ]
    assert errors[1] < 0.6 * errors[0]  # half of the squares count as noise, which leaves half of it
    # Without couplings there is no noise, and whatever shape the diagonal has it stays.
    sharp = torch.randn(math.prod(SHAPE), generator=seeded(4), dtype=torch.float64)
    assert torch.allclose(diagonal(torch.diag(sharp), Lattice(), 5)[0], sharp, atol=1e-12)


def test_wieners_filter_with_known_noise() -> None:
    """Of a constant with noise it gives the mean; of no noise the image itself."""
    clean = torch.full((200, 1, 12, 12), 3.0, dtype=torch.float64)
    noisy = clean + 0.5 * torch.randn(clean.shape, generator=seeded(0), dtype=torch.float64)
    found = probes.filtered(noisy, torch.full_like(noisy, 0.25))
    assert (found - clean).square().mean() < 0.3 * (noisy - clean).square().mean()
    assert torch.allclose(probes.filtered(noisy, torch.zeros_like(noisy)), noisy, atol=1e-12)


def test_a_rows_probes_are_its_own() -> None:
    matrix = random_matrix()
    whole = diagonal(matrix, Lattice(), 5, seed=6, rows=3)
    x_t = torch.zeros(1, *SHAPE, dtype=torch.float64)
    moments = mmdgs.DiagonalMoments(linear(matrix), probes=5, floor=-math.inf, design=Lattice())
    last = moments(x_t, LEVEL, generator=Streams(6, 1, 2)).cov.diagonal().flatten(1) / LEVEL.tweedie
    assert torch.allclose(whole[2], last[0], atol=1e-10)


def test_points_have_no_lattice() -> None:
    moments = mmdgs.DiagonalMoments(mmdgs.data.mog_density().denoiser(), probes=5, design=Lattice())
    with pytest.raises(ValueError, match=r"lattice probes are for images .* got shape \(3, 2\)"):
        moments(torch.zeros(3, 2), LEVEL, generator=seeded(0))
