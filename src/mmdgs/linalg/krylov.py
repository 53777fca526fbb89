"""A covariance known by its products alone: roots, densities and variances by lanczos.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.linalg.lanczos import Function, KrylovSpace, Product, lanczos
from mmdgs.linalg.operators import Dense, Implicit, require_room, require_room_for_dense
from mmdgs.linalg.repair import error_floor, lifted, watch

BASIS_NUMBERS = 1 << 24
"""Numbers that the bases of several start vectors a row may hold at once; more go in chunks."""
FLOOR_PROBES = 2
"""Probes whose Ritz values say how much lies below zero: each sees the whole spectrum."""
DENSITY_STEPS = 4
"""r' C^-1 r takes so many times the steps of a draw: 1 / x is largest where Ritz values come last.

Where C was the posterior covariance of a Gaussian with the covariance of 16x16 images, at sigma
1.5, with an error of 0.1% of sigma^2, 20, 40 and 80 steps gave 0.69, 0.95 and 0.998 of what 160
did, at the floor that fits best. Densities with ten probes take a quarter more products for it."""


@dataclass(frozen=True)
class Krylov(Implicit):
    """a L(C) + b I for a symmetric C known by its products; L lifts eigenvalues to a floor.

    The floor is `floor`; with a `share` it is that of the Ritz values by the rule of repair.py, at
    least `floor`: for `root` of those of the vector itself, for all else of those of two probes.
    `root` takes `steps` products, `coordinates` DENSITY_STEPS times as many, `spectrum` `steps` for
    each probe: signs (S, B, d) from `probes`, the same at every call. `diagonal` is diag C by
    `estimate` (None: the mean of s * C s over the probes s) and the mean of what was lifted.
    `apply` and `variance_along` take one product, in which only the variance itself can be lifted.
    Where d <= steps everything is exact, and nothing is drawn. `like` (B, ...) gives shape, dtype
    and device. The operator holds whatever the product holds (a network's graph) until dropped.
    """

    product: Product
    like: Tensor
    steps: int
    floor: float
    probes: Callable[[], Tensor] | None = None
    estimate: Callable[[], Tensor] | None = None
    share: float = 0.0
    scale: float = 1.0
    shift: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the steps reach every dimension."""
        return self.dim <= self.steps

    def diagonal(self) -> Tensor:
        if self.exact:
            return self.as_dense().diagonal()
        values, weights = _pooled(*self._few)
        floor = self._floor
        lift = (weights * (values.clamp(min=floor) - values)).sum(1, keepdim=True)
        variances = self._estimated.double() + lift
        # An estimate has errors of its own, whatever the floor of eigenvalues.
        variances = variances.clamp(min=floor).maximum(error_floor(variances, self.floor))
        return (self.scale * variances + self.shift).to(self.like.dtype).reshape(self.like.shape)

    @cached_property
    def _estimated(self) -> Tensor:
        """diag C before any lift, (B, d)."""
        if self.estimate is not None:
            return self.estimate().flatten(1)
        signs = self._signs()
        parts = [(part * self.product(part)).sum(0) for part in signs.split(self._at_once(1))]
        return torch.stack(parts).sum(0) / len(signs)

    def dense(self) -> Tensor:
        return self.as_dense().dense()

    def as_dense(self) -> Dense:
        """The same covariance, formed by d products and decomposed."""
        return self._matrix[0]

    @cached_property
    def _matrix(self) -> tuple[Dense, Tensor]:
        """The dense covariance, and the fraction of its eigenvalues that were lifted, (B,)."""
        rows, d, like = len(self.like), self.dim, self.like
        require_room_for_dense(like)
        basis = torch.eye(d, dtype=like.dtype, device=like.device)[:, None, :].expand(-1, rows, -1)
        matrix = torch.cat([self.product(part) for part in basis.split(self._at_once(1))])
        matrix = matrix.transpose(0, 1)
        cov = Dense.from_matrix(0.5 * (matrix + matrix.mT), like.shape[1:])
        values, repaired = lifted(cov.values, self.floor, self.share)
        return Dense(values, cov.vectors, cov.event_shape).affine(self.scale, self.shift), repaired

    def apply(self, v: Tensor) -> Tensor:
        if self.exact:
            return self.as_dense().apply(v)
        start = v.flatten(1)[None]
        squares = start.square().sum(-1, keepdim=True)
        image = self.product(start)
        missing = (self.floor * squares - (start * image).sum(-1, keepdim=True)).clamp(min=0)
        image = image + torch.where(squares > 0, missing / squares, 0.0) * start
        return (self.scale * image + self.shift * start)[0].reshape(v.shape)

    def unlifted(self, v: Tensor) -> Tensor:
        """a C v + b v for v (n, B, ...), with nothing lifted."""
        flat = v.flatten(2)
        return (self.scale * self.product(flat) + self.shift * flat).reshape(v.shape)

    def floor_among(self, values: Tensor) -> Tensor:
        """The smallest value to be believed, (B, 1), among unlifted variances of a C + b I."""
        raw = (values - self.shift) / self.scale
        return self.scale * error_floor(raw, self.floor, self.share) + self.shift

    def root(self, z: Tensor) -> Tensor:
        if self._by_matrix:
            return self.as_dense().root(z)
        space, floor = self._started(z)
        return space.apply(self._of(torch.sqrt, floor))[0].reshape(z.shape).to(z.dtype)

    def root_with_info(self, z: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`root(z)`, the fraction of Ritz values that were lifted, the estimated relative error."""
        if self._by_matrix:
            dense, repaired = self._matrix
            return dense.root(z), {"repaired": repaired, "krylov_error": torch.zeros_like(repaired)}
        space, floor = self._started(z)
        f = self._of(torch.sqrt, floor)
        info = {"repaired": space.below(floor), "krylov_error": space.error(f)}
        root = space.apply(f)[0].reshape(z.shape).to(z.dtype)
        return root, {name: value[0].to(root.dtype) for name, value in info.items()}

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """By Gauss quadrature: r' C^-1 r comes out from below where nothing is repaired.

        The slowest to converge, above all where much is repaired: 1 / x is largest just where it
        has its kink. The quadrature of the last r is kept: distance and density ask for the same.
        """
        if self._by_matrix:
            return self.as_dense().coordinates(r)
        last = self._last.get("r")
        if last is None or last.shape != r.shape or not torch.equal(last, r):
            space = self._space(r.flatten(1)[None], DENSITY_STEPS * self.steps)
            values, weights = space.quadrature
            squares = space.norm[0, :, None].square()
            self._last.update(r=r.clone(), values=values[0], weights=weights[0], squares=squares)
        values, weights = self._last["values"], self._last["weights"]
        if self.probes is not None or not self.share:
            floor = self._floor
        else:
            floor = error_floor(values, self.floor, self.share, weights)
        return self._of(lambda x: x, floor)(values), self._last["squares"] * weights

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """By stochastic Lanczos quadrature over the probes."""
        if self.exact:
            return self.as_dense().spectrum()
        values, weights = _pooled(*self._all)
        return self._of(lambda x: x, self._floor)(values), self.dim * weights

    def variance_along(self, u: Tensor) -> Tensor:
        if self._by_matrix:
            return self.as_dense().variance_along(u)
        start = u.flatten(2)
        if self.exact:
            return self._space(start).quadratic(self._of(lambda x: x, self.floor)).to(u.dtype)
        squares = start.square().sum(-1)
        variances = torch.maximum((start * self.product(start)).sum(-1), self.floor * squares)
        return self.scale * variances + self.shift * squares

    def relifted(self, floor: float, share: float = 0.0) -> Krylov:
        """The same with another floor; both share what products show before any lift."""
        other = replace(self, floor=floor, share=share)
        shared = ("_last",) if self.exact else ("_last", "_few", "_all", "_estimated")
        other.__dict__.update({name: getattr(self, name) for name in shared})
        return other

    @cached_property
    def _last(self) -> dict[str, Tensor]:
        """The last r of `coordinates`, its Ritz values and weights (B, k), and |r|^2 (B, 1)."""
        return {}

    @property
    def _by_matrix(self) -> bool:
        """Whether the rule needs all eigenvalues, which take no more products than a draw."""
        return self.exact and self.share > 0

    @cached_property
    def _few(self) -> tuple[Tensor, Tensor]:
        """Ritz values and weights (n, B, steps) of the probes that say where the floor is."""
        return self._quadrature(self._signs()[:FLOOR_PROBES])

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """The same of all probes."""
        rest = self._signs()[FLOOR_PROBES:]
        if not len(rest):
            return self._few
        values, weights = zip(self._few, self._quadrature(rest), strict=True)
        return torch.cat(values), torch.cat(weights)

    def _quadrature(self, signs: Tensor) -> tuple[Tensor, Tensor]:
        values, weights = [], []
        for part in signs.split(self._at_once(self.steps)):
            value, weight = self._space(part).quadrature
            # An invariant space ends early: values without weight fill it up.
            missing = (0, self.steps - value.shape[-1])
            values.append(functional.pad(value, missing, value=1))
            weights.append(functional.pad(weight, missing))
        return torch.cat(values), torch.cat(weights)

    @property
    def _floor(self) -> float | Tensor:
        """The floor of all but draws, one number or (B, 1)."""
        if not self.share:
            return self.floor
        values, weights = _pooled(*self._few)
        return error_floor(values, self.floor, self.share, weights)

    def _started(self, z: Tensor) -> tuple[KrylovSpace, float | Tensor]:
        """The space of a draw, and its floor by its own Ritz values."""
        space = self._space(z.flatten(1)[None])
        if not self.share:
            return space, self.floor
        values, weights = space.quadrature
        floor = error_floor(values[0], self.floor, self.share, weights[0])[None]
        watch(space.below(floor))
        return space, floor

    def _of(self, f: Function, floor: float | Tensor) -> Function:
        return lambda x: f(self.scale * x.clamp(min=floor) + self.shift)

    def _space(self, start: Tensor, steps: int | None = None) -> KrylovSpace:
        n, rows, d = start.shape
        steps = min(steps or self.steps, d)
        need = 2 * n * rows * steps * d * start.dtype.itemsize  # the basis, and a step's workspace
        what = f"Krylov bases of {n * rows} x {steps} x {d} numbers"
        require_room(need, start.device, what, "use fewer steps, or fewer rows at a time")
        return lanczos(self.product, start, steps)

    def _signs(self) -> Tensor:
        if self.probes is None:
            raise TypeError(
                "log_prob, logdet and diagonal draw probes: make the posterior with generator=, "
                f"or take steps >= {self.dim}, where they are exact"
            )
        return self.probes()

    def _at_once(self, steps: int) -> int:
        return max(1, BASIS_NUMBERS // (steps * self.like.numel()))


def _pooled(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values and weights (n, B, k) of several start vectors as one quadrature, (B, n k)."""
    return values.movedim(0, 1).flatten(1), weights.movedim(0, 1).flatten(1) / len(values)
