"""Probes of the diagonal: what classes keep apart, what is exact, what is unbiased, and what
filtering does.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracles import linear_denoiser, numbers
from torch import Tensor
from torch.nn import functional

import mmdgs
from experiments.hadamard import Hadamard
from mmdgs.moments import probes
from mmdgs.moments.probes import Lattice, Rademacher, pixel_classes
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, seeded

LEVEL = NoiseLevel(sigma=0.5)
SHAPE = (3, 9, 10)


def diagonal(
    matrix: Tensor, design: probes.ProbeDesign, count: int, seed: int = 0, rows: int = 1
) -> Tensor:
    """The estimated diagonal of J, (rows, d), without the floor."""
    x_t = torch.zeros(rows, *SHAPE, dtype=torch.float64)
    moments = mmdgs.DiagonalMoments(
        linear_denoiser(matrix), probes=count, floor=-math.inf, design=design
    )
    q = moments(x_t, LEVEL, generator=Streams(seed, rows))
    return q.cov.diagonal().flatten(1) / LEVEL.tweedie


def random_matrix(seed: int = 0) -> Tensor:
    return numbers(math.prod(SHAPE), math.prod(SHAPE), seed=seed)


def near_pixels() -> Tensor:
    """(d, d): whether two numbers lie in 3 x 3 pixels of one channel."""
    d = math.prod(SHAPE)
    basis = torch.eye(d, dtype=torch.float64).reshape(d, *SHAPE)
    ones = torch.ones(3, 1, 3, 3, dtype=torch.float64)
    return functional.conv2d(basis, ones, padding=1, groups=3).flatten(1) != 0


@pytest.mark.parametrize("channels", [1, 3])
def test_five_classes_keep_a_pixel_apart_from_its_neighbours_and_its_other_channels(
    channels: int,
) -> None:
    place = pixel_classes(5, channels, 12, 12)
    assert sorted(place.unique().tolist()) == list(range(5))
    assert (place[:, 1:] != place[:, :-1]).all()  # above and below
    assert (place[:, :, 1:] != place[:, :, :-1]).all()  # left and right
    if channels == 1:
        assert (place[:, 1:, 1:] != place[:, :-1, :-1]).all()
        assert (place[:, 1:, :-1] != place[:, :-1, 1:]).all()
    assert (place.diff(dim=0) != 0).all()  # next channels


@pytest.mark.parametrize("count", [1, 5, 64, 67, 130])
def test_every_number_is_hit_as_often_as_any_other_or_once_less(count: int) -> None:
    v = Lattice().draw(count, torch.zeros(2, *SHAPE), Streams(0, 2))
    assert v.shape == (count, 2, *SHAPE)
    hits = (v != 0).sum(0)
    rounds = math.ceil(count / 64)  # of at most 64 classes; the last may lack some of them
    assert hits.max() == rounds
    assert hits.min() >= max(1, rounds - 1)
    assert set(v.unique().tolist()) <= {-1.0, 0.0, 1.0}


def same_class(classes: int) -> Tensor:
    """(d, d): 1 for two numbers of one class, 0 on the diagonal."""
    place = pixel_classes(classes, *SHAPE).flatten()
    return (place[:, None] == place[None, :]).double().fill_diagonal_(0)


def assert_unbiased(estimate: Tensor, matrix: Tensor, variance: Tensor) -> None:
    """Estimates (n, d) have the diagonal for their mean and this variance: 5 standard errors in 270
    numbers.
    """
    error = (estimate.mean(0) - matrix.diagonal()) / (variance / len(estimate)).sqrt()
    assert error.abs().max() < 5
    assert torch.allclose(estimate.var(0), variance, rtol=0.2)


def test_a_local_jacobian_has_its_diagonal_exactly_from_few_products() -> None:
    """A different 3 x 3 kernel at every pixel, channels apart: no two pixels of a class see each
    other.
    """
    matrix = torch.where(near_pixels(), random_matrix(), 0.0)
    # In three channels a class of five holds diagonal neighbours; thirteen hold none.
    estimate = diagonal(matrix, Lattice(smooth=False), 13)
    assert torch.allclose(estimate[0], matrix.diagonal(), atol=1e-12)
    rough = diagonal(matrix, Rademacher(), 13)
    assert (rough[0] - matrix.diagonal()).norm() > 0.3 * matrix.diagonal().norm()


@pytest.mark.parametrize("count", [5, 10])
def test_without_the_filter_the_estimate_is_unbiased_with_the_stated_variance(count: int) -> None:
    matrix = random_matrix()
    estimate = diagonal(matrix, Lattice(smooth=False), count, rows=4_000)
    assert_unbiased(estimate, matrix, (matrix.square() * same_class(count)).sum(0))


@pytest.mark.parametrize("count", [2, 16, 128])
def test_whole_hadamard_blocks_give_the_lattices_estimate_though_every_probe_touches_every_pixel(
    count: int,
) -> None:
    matrix = random_matrix()
    v = Hadamard().draw(count, torch.zeros(2, *SHAPE), Streams(0, 2))
    assert v.shape == (count, 2, *SHAPE)
    assert (v.abs() == 1).all()
    by_lattice = diagonal(matrix, Lattice(smooth=False), count, rows=3)
    assert torch.allclose(diagonal(matrix, Hadamard(), count, rows=3), by_lattice, atol=1e-10)


def test_the_papers_probes_are_the_mean_over_signs() -> None:
    """The mean of v * (v' J) over signs, number for number."""
    matrix = random_matrix()
    v = mmdgs.randomness.signs((1, 4, *SHAPE), matrix, Streams(3, 1))[0].flatten(1)
    estimate = diagonal(matrix, Rademacher(), 4, seed=3)
    assert torch.allclose(estimate[0], (v * (v @ matrix)).mean(0), atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "design"),
    [
        (SHAPE, Lattice()),
        ((1, 2, 135), Lattice()),
        ((3, 1, 90), Rademacher(smooth=True)),
        ((3, 90, 1), Rademacher(smooth=True)),
        ((270,), Rademacher(smooth=True)),
        ((27, 10), Rademacher(smooth=True)),
    ],
    ids=str,
)
def test_by_itself_it_takes_lattices_for_images_and_filtered_signs_for_all_else(
    shape: tuple[int, ...], design: probes.ProbeDesign
) -> None:
    x_t, denoiser = torch.zeros(2, *shape, dtype=torch.float64), linear_denoiser(random_matrix())
    default, by_design = (
        mmdgs.DiagonalMoments(denoiser, probes=4, design=probes)(
            x_t, LEVEL, generator=Streams(0, 2)
        ).cov.diagonal()
        for probes in (None, design)
    )
    assert torch.equal(default, by_design)


def test_filtered_signs_are_nearer_where_probes_disagree_and_the_papers_where_they_agree() -> None:
    """Diagonals of spread 0.3, and couplings that give an estimate of S probes the variance 1 / S:
    the best linear estimate of a deviation from the mean has the gain 0.09 / (0.09 + 1 / S)."""
    size, count = 270, 4
    spread = 0.3 * numbers(size, seed=5)
    matrix = random_matrix()
    matrix = matrix * (1 / (matrix.square().sum(0) - matrix.diagonal().square()).sqrt())
    matrix = matrix - torch.diag(matrix.diagonal()) + torch.diag(2 + spread)
    plain, smooth = (
        diagonal(matrix, Rademacher(smooth), count, rows=400) for smooth in (False, True)
    )
    errors = [(x - matrix.diagonal()).square().mean().item() for x in (plain, smooth)]
    gain = 0.09 / (0.09 + 1 / count)
    assert errors[0] == pytest.approx(1 / count, rel=0.1)
    assert errors[1] == pytest.approx(gain / count, rel=0.15)
    assert torch.allclose(smooth.mean(1), plain.mean(1), atol=1e-12)
    x_t = torch.zeros(400, *SHAPE, dtype=torch.float64)
    ours = mmdgs.DiagonalMoments(
        linear_denoiser(matrix), probes=count, design=Rademacher(smooth=True)
    )
    said = ours(x_t, LEVEL, generator=Streams(0, 400)).cov.errors / LEVEL.tweedie
    assert said.square().mean().item() == pytest.approx(errors[1], rel=0.15)
    alone = torch.diag(matrix.diagonal())  # nothing is coupled: every probe has the diagonal itself
    exact = diagonal(alone, Rademacher(smooth=True), count)[0]
    assert torch.allclose(exact, alone.diagonal(), atol=1e-12)
    assert torch.equal(*(diagonal(matrix, Rademacher(s), 1, rows=3) for s in (False, True)))


def test_filtering_brings_a_smooth_diagonal_nearer_and_leaves_a_sharp_one() -> None:
    i = torch.linspace(0, 3, SHAPE[1], dtype=torch.float64)[:, None]
    smooth = (2 + torch.sin(i)).expand(SHAPE).flatten()
    noise = 0.15 * random_matrix()
    matrix = noise - torch.diag(noise.diagonal()) + torch.diag(smooth)
    errors = [
        (diagonal(matrix, Lattice(smooth=filtering), 5, rows=50) - smooth).norm(dim=1).mean().item()
        for filtering in (False, True)
    ]
    # 0.7 of the squares count as noise, which leaves 0.3 of it, and the mean's own.
    assert errors[1] < 0.4 * errors[0]
    # Without couplings there is no noise, and whatever shape the diagonal has it stays.
    sharp = numbers(math.prod(SHAPE), seed=4)
    assert torch.allclose(diagonal(torch.diag(sharp), Lattice(), 5)[0], sharp, atol=1e-12)


def test_the_noise_is_read_where_a_probe_is_far() -> None:
    """Near pixels are coupled strongly, and 40 classes keep them apart: no noise, so nothing may be
    smoothed.
    """
    matrix = torch.where(near_pixels(), random_matrix(), 0.0)
    assert torch.allclose(diagonal(matrix, Lattice(), 40)[0], matrix.diagonal(), atol=1e-12)


def test_wieners_filter_with_known_noise() -> None:
    """Of a constant with noise it gives the mean; of no noise the image itself."""
    clean = torch.full((200, 1, 12, 12), 3.0, dtype=torch.float64)
    noisy = clean + 0.5 * numbers(*clean.shape)
    estimate, _ = probes.filtered(noisy, torch.full_like(noisy, 0.25))
    assert (estimate - clean).square().mean() < 0.3 * (noisy - clean).square().mean()
    rough = numbers(*clean.shape, seed=1)
    estimate, error = probes.filtered(rough + noisy, torch.full_like(noisy, 0.25))
    left = (estimate - rough - clean).square().mean().item()
    assert error.square().mean().item() == pytest.approx(left, rel=0.1)
    assert torch.allclose(probes.filtered(noisy, torch.zeros_like(noisy))[0], noisy, atol=1e-12)


def test_a_rows_probes_are_its_own() -> None:
    matrix = random_matrix()
    whole = diagonal(matrix, Lattice(), 5, seed=6, rows=3)
    x_t = torch.zeros(1, *SHAPE, dtype=torch.float64)
    moments = mmdgs.DiagonalMoments(
        linear_denoiser(matrix), probes=5, floor=-math.inf, design=Lattice()
    )
    last = moments(x_t, LEVEL, generator=Streams(6, 1, 2)).cov.diagonal().flatten(1) / LEVEL.tweedie
    assert torch.allclose(whole[2], last[0], atol=1e-10)


def test_points_have_no_classes_of_pixels() -> None:
    moments = mmdgs.DiagonalMoments(mmdgs.data.mog_density().denoiser(), probes=1, design=Lattice())
    with pytest.raises(ValueError, match=r"images .* got shape \(3, 2\)"):
        moments(torch.zeros(3, 2), LEVEL, generator=seeded(0))
