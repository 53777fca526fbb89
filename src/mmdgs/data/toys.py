"""The paper's 2-D data sets, and the densities they are drawn from.

Rings and roll have the numbers that scikit-learn gives for a seed, scaled as the authors did. Each
law is a Gaussian mixture: exact for the mixture of Gaussians, and for rings and roll a mixture
along the curve, spaced far below the width of the noise, so exact posteriors are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmdgs.errors import unknown_name
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture

MOG_MEANS = [[-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [1.0, -1.0]]
MOG_STD = 0.2
RINGS_SCALE, RINGS_NOISE, RINGS_FACTOR = 1.3, 0.05, 0.5
ROLL_SCALE, ROLL_NOISE = 0.1, 0.5
CURVE_POINTS = 400  # components along a curve: at most 0.7 noise widths apart, a ripple below 1e-8


@dataclass(frozen=True)
class Toy:
    """A 2-D set: `sample(n, seed)` draws (n, 2) points of the law `density()`.

    Chains start at N(start, 0.1^2).
    """

    name: str
    title: str
    sample: Callable[[int, int], Tensor]
    density: Callable[[], GaussianMixture]
    start: tuple[float, float] = (0.0, 0.0)
    modes: Tensor | None = None


def mog_density() -> GaussianMixture:
    """Four Gaussians of standard deviation 0.2 at (+-1, +-1), equal weights (section 2.4)."""
    return GaussianMixture([0.25] * 4, MOG_MEANS, MOG_STD)


def rings_density() -> GaussianMixture:
    """Two circles of radius 1.3 and 0.65, with Gaussian noise of standard deviation 0.065."""
    angle = torch.arange(CURVE_POINTS // 2, dtype=torch.float64) * (4 * math.pi / CURVE_POINTS)
    circle = RINGS_SCALE * torch.stack([angle.cos(), angle.sin()], dim=1)
    return _along(torch.cat([circle, RINGS_FACTOR * circle]), RINGS_SCALE * RINGS_NOISE)


def roll_density() -> GaussianMixture:
    """The spiral t (cos t, sin t) / 10, t uniform on (1.5 pi, 4.5 pi), noise of deviation 0.05."""
    u = (torch.arange(CURVE_POINTS, dtype=torch.float64) + 0.5) / CURVE_POINTS
    t = 1.5 * math.pi * (1 + 2 * u)
    curve = torch.stack([t * t.cos(), t * t.sin()], dim=1)
    return _along(ROLL_SCALE * curve, ROLL_SCALE * ROLL_NOISE)


def _along(points: Tensor, std: float) -> GaussianMixture:
    points = points.to(torch.float32)
    return GaussianMixture(torch.full((len(points),), 1 / len(points)), points, std)


def _rings(n: int, seed: int) -> Tensor:
    """Points of scikit-learn's make_circles: half of them (rounded down) on the outer circle."""
    draws = _numpy_draws(seed)
    circles = []
    for radius, count in ((1, n // 2), (RINGS_FACTOR, n - n // 2)):
        t = np.linspace(0, 2 * np.pi, count, endpoint=False)
        circles.append(radius * np.stack([np.cos(t), np.sin(t)], 1))
    order = np.arange(n)
    draws.shuffle(order)
    points = np.concatenate(circles)[order] + draws.normal(scale=RINGS_NOISE, size=(n, 2))
    return torch.tensor(RINGS_SCALE * points, dtype=torch.float32)


def _roll(n: int, seed: int) -> Tensor:
    """Points of scikit-learn's make_swiss_roll, without the roll's axis."""
    draws = _numpy_draws(seed)
    t = 1.5 * np.pi * (1 + 2 * draws.uniform(size=n))
    draws.uniform(size=n)  # places along the axis
    noise = ROLL_NOISE * draws.standard_normal(size=(3, n))[[0, 2]]
    points = np.stack([t * np.cos(t), t * np.sin(t)]) + noise
    return torch.tensor(ROLL_SCALE * points.T, dtype=torch.float32)


def _numpy_draws(seed: int) -> np.random.RandomState:
    """The generator that scikit-learn makes of a seed; one above 32 bits is given as two words."""
    return np.random.RandomState(seed if seed < 1 << 32 else [seed & 0xFFFFFFFF, seed >> 32])


TOYS = {
    # The authors start the chain of the mixture inside one mode, the others at the origin.
    "mog": Toy(
        "mog",
        "MoG",
        lambda n, seed: mog_density().sample((n,), generator=seeded(seed)),
        mog_density,
        start=(1.0, 1.0),
        modes=torch.tensor(MOG_MEANS),
    ),
    "rings": Toy("rings", "Rings", _rings, rings_density),
    "roll": Toy("roll", "Roll", _roll, roll_density),
}


def toy(name: str) -> Toy:
    """A 2-D set by name."""
    if name not in TOYS:
        raise unknown_name("2-D data set", name, TOYS)
    return TOYS[name]
