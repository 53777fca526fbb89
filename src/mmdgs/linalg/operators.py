"""Covariance operators: what a posterior needs of its covariance C, and no more.

Each operator acts on a batch: vectors are tensors (B, ...) of any event shape with d numbers, and

    diagonal()        diag C                                      (B, ...)
    dense()           C                                           (B, d, d)
    apply(v)          C v                                         (B, ...)
    root(z)           R z with R R' = C, the symmetric root       (B, ...)
    variance_along(u) u' C u, u (n, B, ...)                       (n, B)
    spectrum()        v and counts n: log det C = sum n log v     (B, k) each
    coordinates(r)    v and squares c: r' C^-1 r = sum c / v      (B, k) each
    affine(a, b)      a C + b I                                   an operator of the same kind

mahalanobis(r) and logdet(), (B,) each, are those sums. The symmetric root makes samples continuous
in C. R takes as many standard normals z as `normals` says.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import CovarianceTooLargeError, NonFiniteError, UsageError
from mmdgs.runtime import in_full_precision

matmul, einsum = in_full_precision(torch.matmul), in_full_precision(torch.einsum)

ALWAYS_FITS = 64 << 20
"""Bytes that are taken without asking: asking takes longer than a step of a 2-D chain."""
MOST_DENSE = 1024
"""Dimensions up to which an operator is made a matrix where nothing else answers."""
CLOSED_FORM_ROWS = 64
"""2 x 2 matrices from which on a CPU the closed form beats LAPACK (at 1,000 seven times)."""


class Covariance(ABC):
    """A batch of symmetric positive definite matrices, seen through its actions."""

    @abstractmethod
    def diagonal(self) -> Tensor: ...

    @abstractmethod
    def dense(self) -> Tensor: ...

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor: ...

    @abstractmethod
    def root(self, z: Tensor) -> Tensor: ...

    def normals(self, event_shape: torch.Size) -> torch.Size:
        """The shape of the standard normals that `root` takes for a row x of the event shape."""
        return event_shape

    def root_with_info(self, z: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`root(z)`, and what is known of it only once it is done: numbers (B,) by name."""
        return self.root(z), {}

    @abstractmethod
    def variance_along(self, u: Tensor) -> Tensor: ...

    @abstractmethod
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues v and how many each stands for, (B, k): tr f(C) = sum n f(v) for any f."""

    @abstractmethod
    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues v and squares c of r along them, (B, k): r' f(C) r = sum c f(v) for any f."""

    def mahalanobis(self, r: Tensor) -> Tensor:
        values, squares = self.coordinates(r)
        return (squares / values).sum(1).to(r.dtype)

    def logdet(self) -> Tensor:
        values, counts = self.spectrum()
        return (counts * values.log()).sum(1)

    @abstractmethod
    def affine(self, scale: float, shift: float) -> Covariance: ...


@dataclass(frozen=True)
class Diagonal(Covariance):
    """diag(variances), variances (B, ...). An expanded tensor serves for isotropic covariances.

    `errors` are the standard errors of variances that are estimates, and broadcast to these.
    """

    variances: Tensor
    errors: Tensor | None = None

    def diagonal(self) -> Tensor:
        return self.variances

    def dense(self) -> Tensor:
        require_room_for_dense(self.variances)
        return torch.diag_embed(self.variances.flatten(1))

    def apply(self, v: Tensor) -> Tensor:
        return self.variances * v

    def root(self, z: Tensor) -> Tensor:
        return self.variances.sqrt() * z

    def variance_along(self, u: Tensor) -> Tensor:
        return (u.square() * self.variances).flatten(2).sum(2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return counted(self.variances.flatten(1))

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.variances.flatten(1), r.square().flatten(1)

    def affine(self, scale: float, shift: float) -> Diagonal:
        errors = None if self.errors is None else scale * self.errors
        return Diagonal(scaled(self.variances, scale, shift), errors)


@dataclass(frozen=True)
class Dense(Covariance):
    """V diag(values) V': values (B, d), orthonormal V (B, d, d), vectors of `event_shape`."""

    values: Tensor
    vectors: Tensor
    event_shape: torch.Size

    @classmethod
    def from_matrix(cls, matrix: Tensor, event_shape: torch.Size) -> Dense:
        """Decompose symmetric matrices (B, d, d)."""
        raise_non_finite("denoising covariance", matrix)
        half = matrix.dtype in (torch.float16, torch.bfloat16)  # which eigh does not know
        values, vectors = eigen(matrix.float() if half else matrix)
        return cls(values.to(matrix.dtype), vectors.to(matrix.dtype), event_shape)

    def diagonal(self) -> Tensor:
        return matmul(self.vectors.square(), self.values[..., None]).reshape(-1, *self.event_shape)

    def dense(self) -> Tensor:
        return matmul(self.vectors * self.values[:, None, :], self.vectors.mT)

    def apply(self, v: Tensor) -> Tensor:
        return self._scaled(self.values, v)

    def root(self, z: Tensor) -> Tensor:
        return self._scaled(self.values.sqrt(), z)

    def _scaled(self, values: Tensor, v: Tensor) -> Tensor:
        inner = matmul(self.vectors.mT, v.reshape(len(v), -1, 1))
        return matmul(self.vectors, values[..., None] * inner).reshape(v.shape)

    def variance_along(self, u: Tensor) -> Tensor:
        inner = matmul(self.vectors.mT, u.flatten(2)[..., None])[..., 0]
        return (inner.square() * self.values).sum(2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return counted(self.values)

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.values, matmul(self.vectors.mT, r.reshape(len(r), -1, 1)).squeeze(-1).square()

    def affine(self, scale: float, shift: float) -> Dense:
        return Dense(scale * self.values + shift, self.vectors, self.event_shape)


class Implicit(Covariance):
    """a C + b I for vectors like `like` (B, ...), where only a matrix tells the eigenvalues."""

    like: Any  # subclasses are dataclasses that have these fields
    scale: Any
    shift: Any

    @property
    def dim(self) -> int:
        return math.prod(self.like.shape[1:])

    def affine(self, scale: float, shift: float) -> Any:
        both = {"scale": scale * self.scale, "shift": scale * self.shift + shift}
        return replace(self, **both)  # type: ignore[type-var]

    @cached_property
    def decomposed(self) -> Dense:
        """The matrix's eigenvalues and eigenvectors, up to MOST_DENSE dimensions."""
        self.require_matrix()
        return Dense.from_matrix(self.dense(), self.like.shape[1:])

    def require_matrix(self) -> None:
        if self.dim > MOST_DENSE:
            raise UsageError(
                f"this needs the matrix of a {type(self).__name__} covariance of {self.dim} numbers"
                f", and the limit is {MOST_DENSE}: use draws, or variance_along for directions"
            )

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return self.decomposed.spectrum()

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.decomposed.coordinates(r)


def counted(values: Tensor) -> tuple[Tensor, Tensor]:
    """A spectrum (B, d) in which every value stands for itself."""
    return values, values.new_ones(()).expand_as(values)


def mapped(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of each number; an expanded tensor stays one, so that equal rows are known."""
    base = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    return function(base).expand(x.shape)


def scaled(x: Tensor, scale: float, shift: float) -> Tensor:
    """scale * x + shift, `mapped`."""
    return mapped(x, lambda base: scale * base + shift)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rising eigenvalues (B, d) and eigenvectors (B, d, d) of symmetric matrices (B, d, d)."""
    rows, d = matrix.shape[:2]
    # On a GPU eigh waits for its own error code, which takes longer than the rest of a step.
    if d <= 2 and (matrix.device.type == "cuda" or rows >= CLOSED_FORM_ROWS):
        return (matrix[..., 0], torch.ones_like(matrix)) if d == 1 else _eigen_2x2(matrix)
    return torch.linalg.eigh(matrix)


def _eigen_2x2(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[[a, b], [b, c]] has the values (a + c -+ r) / 2, r = |(a - c, 2 b)|.

    The larger one's vector has half the angle of (a - c, 2 b); that of a multiple of I is 0.
    """
    a, b, c = matrix[:, 0, 0], matrix[:, 1, 0], matrix[:, 1, 1]
    across, along = a - c, 2 * b
    middle, r = a + c, torch.hypot(across, along)
    angle = torch.atan2(along, across).mul_(0.5)
    cos, sin = angle.cos(), angle.sin()
    values = torch.stack([middle - r, middle + r], 1).mul_(0.5)
    return values, torch.stack([-sin, cos, cos, sin], 1).view(-1, 2, 2)


def looks_finite(tensor: Tensor) -> bool:
    """Whether the sum is finite: one number to look at. A sum that overflows is looked into."""
    return math.isfinite(tensor.sum().item())


def raise_non_finite(what: str, tensor: Tensor, advice: str = "") -> None:
    """Raise NonFiniteError naming the rows of `tensor` (B, ...) that are not finite, if any."""
    if looks_finite(tensor):
        return
    bad = (~torch.isfinite(tensor)).flatten(1).any(1)
    if bad.any():
        rows = bad.nonzero().flatten().tolist()
        raise NonFiniteError(what, rows, advice=advice) if advice else NonFiniteError(what, rows)


def available_memory(device: torch.device) -> int | None:
    """Bytes free on the device, or None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # Linux alone has this file
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return None


def require_room_for_dense(like: Tensor) -> None:
    """Refuse dense covariances of vectors (B, ...) that would not fit, saying what they need."""
    rows, d, dtype = len(like), math.prod(like.shape[1:]), like.dtype
    copies = 4  # the Jacobian, its symmetric part, the eigenvectors and the solver's workspace
    what = f"full covariances of {rows} x {d} x {d} {str(dtype).removeprefix('torch.')}"
    advice = "use KrylovMoments or DiagonalMoments(denoiser, probes=10), or fewer rows at a time"
    require_room(copies * rows * d * d * dtype.itemsize, like.device, what, advice)


def require_room(need: int, device: torch.device, what: str, advice: str) -> None:
    """Refuse what would take more bytes than are free on the device."""
    if need < ALWAYS_FITS:
        return
    free = available_memory(device)
    if free is not None and need > free:
        sizes = f"{need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {device}"
        raise CovarianceTooLargeError(f"{what} need about {sizes}; {advice}")
