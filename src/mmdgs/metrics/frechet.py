"""Fréchet distance between two sets of features, each seen as a Gaussian (Heusel et al., 2017).

    |m_1 - m_2|^2 + Tr C_1 + Tr C_2 - 2 Tr (C_1 C_2)^(1/2)

With a root C_2 = R R' the last trace is the sum of the roots of the eigenvalues of R' C_1 R, which
is symmetric; those that are rounding are left out, for their roots would not be. All in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Float
from torch import Tensor

ROUNDING = 1e-14  # of the largest eigenvalue: what eigenvalues that are zero come out as


@dataclass(frozen=True)
class FeatureMoments:
    """Count, mean (d,) and scatter (d, d) = sum (x - mean)(x - mean)'; `+` merges two sets."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Float[Tensor, "n d"]) -> FeatureMoments:
        """The moments of features (n, d)."""
        if features.ndim != 2 or len(features) == 0 or not features.is_floating_point():
            got = f"{features.dtype} {tuple(features.shape)}"
            raise ValueError(f"features must be floating point (n, d), got {got}")
        if not torch.isfinite(features).all():
            raise ValueError("the features hold values that are not finite")
        x = features.detach().double()
        centred = x - x.mean(0)
        return cls(len(x), x.mean(0), centred.mT @ centred)

    def __add__(self, other: FeatureMoments) -> FeatureMoments:
        """The moments of both sets together (Chan et al., 1983)."""
        count, shift = self.count + other.count, other.mean - self.mean
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        mean = self.mean + shift * (other.count / count)
        return FeatureMoments(count, mean, self.scatter + other.scatter + between)

    def to(self, device: torch.device | str) -> FeatureMoments:
        """The same on another device; itself, with its root, where it is there."""
        if torch.device(device) == self.mean.device:
            return self
        return FeatureMoments(self.count, self.mean.to(device), self.scatter.to(device))

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance (d, d)."""
        if self.count < 2:
            raise ValueError("a covariance needs at least two rows of features")
        return self.scatter / (self.count - 1)

    @cached_property
    def root(self) -> Tensor:
        """R with R R' the covariance, taken once for a reference of several comparisons."""
        values, vectors = torch.linalg.eigh(self.covariance.double())
        return vectors * values.clamp(min=0).sqrt()  # rounding may make some negative


def frechet_distance(
    a: Float[Tensor, "n d"] | FeatureMoments, b: Float[Tensor, "m d"] | FeatureMoments
) -> float:
    """The distance (squared, as is the custom) between two sets of features, or their moments.

    Biased upwards for few rows: compare like sizes.
    """
    first, second = (x if isinstance(x, FeatureMoments) else FeatureMoments.of(x) for x in (a, b))
    if first.mean.shape != second.mean.shape:
        sizes = f"{len(first.mean)} and {len(second.mean)}"
        raise ValueError(f"features must be of one dimension, got {sizes}")
    spread = first.covariance.double().trace() + second.covariance.double().trace()
    values = torch.linalg.eigvalsh(second.root.mT @ first.covariance.double() @ second.root)
    shared = values[values > ROUNDING * values.max()].sqrt().sum()
    apart = (first.mean.double() - second.mean.double()).square().sum()
    return (apart + spread - 2 * shared).item()


def left_out_distances(groups: Sequence[FeatureMoments], other: FeatureMoments) -> list[float]:
    """The distance of all groups but one, for each of them: what `jackknife_interval` takes."""
    others = ([*groups[:i], *groups[i + 1 :]] for i in range(len(groups)))
    return [frechet_distance(reduce(FeatureMoments.__add__, rest), other) for rest in others]
