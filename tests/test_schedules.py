"""Schedules of noise levels: their formulas, their ends, levels and timesteps of diffusers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel
from mmdgs.schedules import (
    edm,
    geometric,
    parse_levels,
    subsampled,
    variance_preserving_cosine,
    variance_preserving_linear,
)

EXPLODING = {
    "ncsnv2": (geometric(232, 50, 0.01), 50, 0.01),
    "ncsnv2 for faces": (geometric(500, 90, 0.01), 90, 0.01),
    "edm": (edm(18), 80, 0.002),
    "edm, other ends": (edm(40, 10.0, 0.1, 3.0), 10, 0.1),
}
PRESERVING = {
    "linear": variance_preserving_linear(),
    "linear, short": variance_preserving_linear(10, 0.01, 0.5),
    "cosine": variance_preserving_cosine(),
    "cosine, short": variance_preserving_cosine(20, 0.02, 0.9),
    "one step": variance_preserving_linear(1),
}
ALL = {**{name: levels for name, (levels, _, _) in EXPLODING.items()}, **PRESERVING}


@pytest.mark.parametrize("levels", ALL.values(), ids=ALL.keys())
def test_levels_go_from_the_noisiest_to_the_cleanest(levels: tuple[NoiseLevel, ...]) -> None:
    assert all(noisier.variance > cleaner.variance for noisier, cleaner in pairwise(levels))


@pytest.mark.parametrize("levels", PRESERVING.values(), ids=PRESERVING.keys())
def test_preserving_levels_preserve_the_variance(levels: tuple[NoiseLevel, ...]) -> None:
    assert [level.alpha**2 + level.sigma**2 for level in levels] == pytest.approx(
        [1.0] * len(levels), rel=1e-14
    )


def test_geometric_has_one_factor() -> None:
    levels = geometric(232, 50, 0.01)
    assert len(levels) == 232
    factor = (0.01 / 50) ** (1 / 231)
    assert [b.sigma / a.sigma for a, b in pairwise(levels)] == pytest.approx(
        [factor] * 231, rel=1e-12
    )


def test_edm_is_even_in_the_root() -> None:
    levels = edm(18)
    roots = [80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7)) for i in range(18)]
    assert [level.sigma for level in levels] == pytest.approx(
        [root**7 for root in roots], rel=1e-13
    )


@pytest.mark.parametrize(
    ("levels", "name"),
    [(variance_preserving_linear(), "linear"), (variance_preserving_cosine(), "squaredcos_cap_v2")],
    ids=["linear", "cosine"],
)
def test_preserving_levels_are_those_of_diffusers(
    levels: tuple[NoiseLevel, ...], name: str
) -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DDPMScheduler(
        1000, beta_start=1e-4, beta_end=0.02, beta_schedule=name
    ).alphas_cumprod
    # They multiply a thousand numbers in single precision.
    assert [level.alpha**2 for level in reversed(levels)] == pytest.approx(
        theirs.tolist(), rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize("count", [2, 16, 333, 1000])
@pytest.mark.parametrize(
    ("spacing", "theirs"), [("even", "linspace"), ("leading", "leading"), ("trailing", "trailing")]
)
def test_fewer_levels_are_those_of_diffusers(spacing: str, theirs: str, count: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(1000, timestep_spacing=theirs)
    scheduler.set_timesteps(count)
    levels = variance_preserving_linear()
    place = {level: 999 - i for i, level in enumerate(levels)}
    assert [
        place[level] for level in subsampled(levels, count, spacing)
    ] == scheduler.timesteps.tolist()


def test_fewer_levels_by_hand() -> None:
    levels = geometric(10, 10, 1)
    kept = {
        "even": [0, 3, 6, 9],  # 9 / 3 apart, both ends
        "leading": [3, 5, 7, 9],  # 10 // 4 apart, from the clean end
        "trailing": [0, 2, 5, 8],  # places 10, 7.5, 5 and 2.5 of 10, halves to even
    }
    for spacing, indices in kept.items():
        assert subsampled(levels, 4, spacing) == tuple(levels[i] for i in indices)
        assert subsampled(levels, 10, spacing) == levels
        assert len(set(subsampled(levels, 7, spacing))) == 7
    assert subsampled(levels, 1) == levels[:1]


TEXTS = {
    "geometric:232:50:0.01": geometric(232, 50, 0.01),
    "linear:1000": variance_preserving_linear(),
    "linear": variance_preserving_linear(),
    "linear:20:0.001:0.1": variance_preserving_linear(20, 0.001, 0.1),
    "cosine:50": variance_preserving_cosine(50),
    "cosine:50:0.01:0.9": variance_preserving_cosine(50, 0.01, 0.9),
    "edm:18": edm(18),
    "edm:18:10:1e-1:3": edm(18, 10, 0.1, 3),
}


@pytest.mark.parametrize("text", TEXTS)
def test_levels_from_text(text: str) -> None:
    assert parse_levels(text) == TEXTS[text]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "geometric:232:50:0.01"),
        ("geometric:232:50:0.01:3", "4 numbers"),
        ("geometric:232:fifty:0.01", "'fifty'"),
        ("geometric:232:0.01:50", "first must be larger than last"),
        ("geometric:10:-1:0.01", "first .* got -1.0"),
        ("edm", r"edm:count:\[largest\]:\[smallest\]:\[rho\]"),
        ("edm:18:80:0.002:0", "rho .* got 0.0"),
        ("linear:0", "at least 1, got 0"),
        ("linear:10:0.1:1", "last_beta .* got 1.0"),
        ("linear:1000:0.9:0.9", "alpha .* got 0.0"),
    ],
)
def test_texts_that_are_no_levels(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_levels(text)


@pytest.mark.parametrize(
    ("count", "spacing", "message"),
    [(11, "even", "11 of 10"), (0, "even", "got 0"), (5, "odd", "'odd'")],
)
def test_fewer_levels_that_cannot_be(count: int, spacing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subsampled(geometric(10, 10, 1), count, spacing)
