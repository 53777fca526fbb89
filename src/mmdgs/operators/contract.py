"""What a linear operator A is: x (B, *shape) -> A x (B, *out_shape), and its adjoint A'.

An operator of this package may say more of itself, by which a conditioned posterior takes no
iterations, or few:

    squares(v)         the diagonal of A diag(v) A', where no two measurements share a number of x
    cosine_gains(v)    the eigenvalues of A, where it is diagonal in cosines Q (linalg/spectral.py)
    cosine_squares(v)  those of A Q diag(v) Q' A', where this is diagonal in the cosines of y
    cosine_power(v)    the squares of the gains, where it is nearly so: a preconditioner
    channelwise        whether it measures every channel alike, and by itself

Each is None (False) where it is not so. Anything with `shape`, `out_shape`, a call and `adjoint` is
an operator too (`LinearOperator`), and so is anything with `A` and `A_adjoint`, such as a
LinearPhysics of deepinv. Those of others are checked once: whether A is linear, row by row, and
whether <A x, y> = <x, A' y>.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs.errors import UsageError, first_line
from mmdgs.runtime import in_full_precision

CHECK_SEED = 21
CHECK_TOLERANCE = 1e-3
"""How far the two sides of an identity may be apart, relative to the sizes of its terms: some
hundred roundings of float32 at the most, and a wrong adjoint is off by far more."""


@runtime_checkable
class LinearOperator(Protocol):
    """x (B, *shape) -> A x (B, *out_shape), rows independent; `adjoint` is A'."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def out_shape(self) -> Sequence[int]: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def adjoint(self, y: Tensor, /) -> Tensor: ...


class Operator(abc.ABC):
    """A linear operator of this package: it checks shapes, and knows of its structure."""

    by_rows = False
    """Whether each row of a batch has an operator of its own."""

    def __init__(self, shape: Sequence[int], out_shape: Sequence[int]) -> None:
        self.shape, self.out_shape = torch.Size(shape), torch.Size(out_shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)} -> {tuple(self.out_shape)})"

    def __call__(self, x: Tensor, /) -> Tensor:
        """A x, (B, *out_shape)."""
        if x.shape[1:] != self.shape:
            raise ValueError(f"{self!r} takes a batch of its shape, got {tuple(x.shape)}")
        return self._forward(x)

    def adjoint(self, y: Tensor, /) -> Tensor:
        """A' y, (B, *shape)."""
        if y.shape[1:] != self.out_shape:
            raise ValueError(f"the adjoint of {self!r} takes what it gives, got {tuple(y.shape)}")
        return self._adjoint(y)

    @property
    def channelwise(self) -> bool:
        return False

    def squares(self, v: Tensor) -> Tensor | None:
        """(B, *out_shape), for v (B, *shape)."""
        return None

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        """(*shape), as A has x's shape then."""
        return None

    def cosine_squares(self, v: Tensor) -> Tensor | None:
        """(B, *out_shape), for v (B, *shape)."""
        gains = self.cosine_gains(v)
        return None if gains is None else gains.square() * v

    def cosine_power(self, like: Tensor) -> Tensor | None:
        """(*shape)."""
        gains = self.cosine_gains(like)
        return None if gains is None else gains.square()

    def known(self, y: Tensor) -> Tensor:
        """Measurements with what says nothing (pixels under a mask) set to zero."""
        return y

    @abc.abstractmethod
    def _forward(self, x: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _adjoint(self, y: Tensor) -> Tensor: ...


class Constant:
    """A tensor of an operator, kept in every type and on every device it was asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copies: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def at(self, like: Tensor) -> Tensor:
        """The tensor in the type and on the device of another."""
        key = (like.dtype, like.device)
        if key not in self._copies:
            self._copies[key] = self.tensor.to(like)
        return self._copies[key]


def along(x: Tensor, matrices: Sequence[Tensor], lead: int = 2) -> Tensor:
    """x with a matrix applied along each dimension but the first `lead`."""
    for dim, matrix in enumerate(matrices, start=lead):
        if dim == x.ndim - 1:
            x = x @ matrix.mT
        else:
            x = (matrix @ x.flatten(dim + 1)).unflatten(-1, x.shape[dim + 1 :])
    return x


class Matrix(Operator):
    """y = M x for a matrix M (m, d), where x has d numbers in any shape, (d,) by default."""

    def __init__(self, matrix: Tensor, shape: Sequence[int] | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"a matrix is a tensor (measurements, numbers), got {_kind(matrix)}")
        if not torch.isfinite(matrix).all():
            raise ValueError("the matrix of an operator must be finite")
        m, d = matrix.shape
        event = (d,) if shape is None else tuple(shape)
        if math.prod(event) != d:
            raise ValueError(f"a matrix with {d} columns does not fit x of shape {event}")
        super().__init__(event, (m,))
        self.matrix = Constant(matrix)

    @in_full_precision
    def _forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.matrix.at(x).mT

    @in_full_precision
    def _adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.matrix.at(y)).reshape(-1, *self.shape)


class FunctionOperator(Operator):
    """A linear function of torch tensors; without an adjoint, autograd's products are taken."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Sequence[int],
        out_shape: Sequence[int],
        adjoint: Callable[[Tensor], Tensor] | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__(shape, out_shape)
        self.function, self.transposed, self.name = function, adjoint, name

    def __repr__(self) -> str:
        return f"{self.name}({tuple(self.shape)} -> {tuple(self.out_shape)})"

    def _forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        if self.transposed is not None:
            return self.transposed(y)
        _, pull, *_ = torch.func.vjp(self.function, y.new_zeros(len(y), *self.shape))
        return pull(y)[0]


class Composed(Operator):
    """One operator after another, in the order in which they are applied."""

    def __init__(self, *parts: Operator) -> None:
        for first, then in pairwise(parts):
            if first.out_shape != then.shape:
                raise ValueError(f"{then!r} cannot follow {first!r}: it takes {tuple(then.shape)}")
        super().__init__(parts[0].shape, parts[-1].out_shape)
        self.parts = parts

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.parts))})"

    @property
    def channelwise(self) -> bool:
        return all(part.channelwise for part in self.parts)

    def squares(self, v: Tensor) -> Tensor | None:
        squares: Tensor | None = v
        for part in self.parts:
            squares = None if squares is None else part.squares(squares)
        return squares

    def cosine_squares(self, v: Tensor) -> Tensor | None:
        squares: Tensor | None = v
        for part in self.parts:
            squares = None if squares is None else part.cosine_squares(squares)
        return squares

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        gains = [part.cosine_gains(like) for part in self.parts]
        known = [gain for gain in gains if gain is not None]
        return math.prod(known[1:], start=known[0]) if len(known) == len(gains) else None

    def known(self, y: Tensor) -> Tensor:
        return self.parts[-1].known(y)

    def _forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def _adjoint(self, y: Tensor) -> Tensor:
        for part in reversed(self.parts):
            y = part.adjoint(y)
        return y


def linear(
    function: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    adjoint: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
    name: str | None = None,
) -> Operator:
    """Any linear torch function of batches (B, *shape) as an operator, with autograd's adjoint.

    It is tried once, on numbers from a fixed seed, of the type and on the device of `like` (float32
    on the CPU), and refused where it is not linear. An `adjoint` is taken in place of autograd's.
    """
    name = str(name or getattr(function, "__name__", type(function).__name__))
    like = torch.empty(0) if like is None else like
    generator = torch.Generator().manual_seed(CHECK_SEED)
    x = torch.randn(3, *shape, generator=generator).to(like)
    x[2] = 2 * x[0] - 3 * x[1]
    out = tried_by_rows(name, function, x)
    if (out[2] - (2 * out[0] - 3 * out[1])).abs().amax() > _near(out):
        raise ValueError(f"{name} is not linear: A(2 u - 3 v) is not 2 A(u) - 3 A(v)")
    operator = FunctionOperator(function, shape, out.shape[1:], adjoint, name)
    y = torch.randn(out.shape, generator=generator).to(out)
    back = _tried(f"the adjoint of {name}", operator.adjoint, y)
    if back.shape != x.shape:
        raise ValueError(f"the adjoint of {name} must give {tuple(x.shape)}, got {_kind(back)}")
    there, here = (out * y).flatten(1).sum(1), (x * back).flatten(1).sum(1)
    norms = [tensor.flatten(1).norm(dim=1) for tensor in (out, y, x, back)]
    if ((there - here).abs() > CHECK_TOLERANCE * (norms[0] * norms[1] + norms[2] * norms[3])).any():
        raise ValueError(
            f"the adjoint of {name} is wrong: <A x, y> = {there[0]:g} and <x, A' y> = {here[0]:g}; "
            "leave it out of mmdgs.operators.linear(function, shape) and autograd gives it"
        )
    return operator


def as_operator(
    operator: Any, shape: Sequence[int] | None = None, like: Tensor | None = None
) -> Operator:
    """Anything that is an operator, or a matrix, as one of this package; others' are checked here.

    `shape` is that of x, which an object with `A` and `A_adjoint` does not know.
    """
    name = type(operator).__name__
    if isinstance(operator, Operator):
        adapted = operator
    elif isinstance(operator, Tensor):
        adapted = Matrix(operator, shape)
    elif hasattr(operator, "A") and hasattr(operator, "A_adjoint"):
        if shape is None:
            raise ValueError(f"{name} does not know the shape of x: give shape=")
        adapted = linear(operator.A, shape, adjoint=operator.A_adjoint, like=like, name=name)
    elif isinstance(operator, LinearOperator):
        adjoint = operator.adjoint
        adapted = linear(operator, operator.shape, adjoint=adjoint, like=like, name=name)
    else:
        raise TypeError(
            f"an operator is a matrix or has shape, out_shape, a call and adjoint (or A and "
            f"A_adjoint), got {_kind(operator)}; mmdgs.operators.linear(function, shape) makes one"
        )
    if shape is not None and adapted.shape != torch.Size(shape):
        raise UsageError(f"{adapted!r} does not fit x of shape {tuple(shape)}")
    return adapted


def tried_by_rows(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for three rows x; refused where it is not finite, or mixes the rows."""
    out = _tried(name, function, x)
    if not (isinstance(out, Tensor) and out.ndim > 1 and len(out) == 3 and out.is_floating_point()):
        raise ValueError(f"{name} must give real numbers (B, ...) for (B, ...), got {_kind(out)}")
    if not torch.isfinite(out).all():
        raise ValueError(f"{name} gives numbers that are not finite")
    alone = function(x[1:2])
    if alone.shape != out[1:2].shape or (alone - out[1:2]).abs().amax() > _near(out):
        raise ValueError(f"{name} mixes the rows of a batch: each row must be measured for itself")
    return out


def _near(out: Tensor) -> Tensor:
    return CHECK_TOLERANCE * out.abs().amax().clamp(min=torch.finfo(out.dtype).tiny)


def _tried(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    try:
        return function(x)
    except Exception as error:
        cause = first_line(error)
        raise ValueError(f"{name} cannot be applied to {tuple(x.shape)}: {cause}") from error


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else name
