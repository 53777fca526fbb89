"""What a linear operator A is: x (B, *shape) -> A x (B, *out_shape), and its adjoint A'.

An operator of this package may say more of itself, by which a conditioned posterior takes no iterations, or few:

    squares(v)         the diagonal of A diag(v) A', where that is all of it: no two measurements share a number of x
    cosine_gains(v)    the eigenvalues of A, where it is diagonal in the basis of cosines Q (linalg/spectral.py)
    cosine_squares(v)  those of A Q diag(v) Q' A', where this is diagonal in the cosines of y
    cosine_power(v)    the squares of the gains, where it is nearly so: a preconditioner
    channelwise        whether it measures every channel alike, and by itself: systems fall into one for each

Anything with `shape`, `out_shape`, a call and `adjoint` is an operator too (`LinearOperator`), and so is anything with
`A` and `A_adjoint`, such as a LinearPhysics of deepinv. Those of others are checked once: whether A is linear, row by
row, and whether <A x, y> = <x, A' y>.
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
"""How far the two sides of an identity may be apart, relative to the sizes of its terms: some hundred roundings of
float32 at the most, and a wrong adjoint is off by far more."""


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
    """A linear operator of this package: it checks shapes, and says what it knows of its structure."""

    def __init__(self, shape: Sequence[int], out_shape: Sequence[int]) -> None:
        self.shape, self.out_shape = torch.Size(shape), torch.Size(out_shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)} -> {tuple(self.out_shape)})"

    def __call__(self, x: Tensor, /) -> Tensor:
        """A x, (B, *out_shape)."""
        if x.shape[1:] != self.shape:
            raise ValueError(f"{self!r} takes (B, {_words(self.shape)}), got {tuple(x.shape)}")
        return self._forward(x)

    def adjoint(self, y: Tensor, /) -> Tensor:
        """A' y, (B, *shape)."""
        if y.shape[1:] != self.out_shape:
            raise ValueError(f"the adjoint of {self!r} takes (B, {_words(self.out_shape)}), got {tuple(y.shape)}")
        return self._adjoint(y)

    @property
    def channelwise(self) -> bool:
        """Whether every channel of x, its first dimension, is measured by itself, and all in the same way."""
        return False

    def squares(self, v: Tensor) -> Tensor | None:
        """The diagonal of A diag(v) A' for v (B, *shape) where nothing else is in it; None where it may be."""
        return None

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        """The eigenvalues (*shape) of A where it is diagonal in cosines; None where it is not."""
        return None

    def cosine_squares(self, v: Tensor) -> Tensor | None:
        """A Q diag(v) Q' A' for v (B, *shape) in the cosines of y, (B, *out_shape); None where it is not diagonal."""
        gains = self.cosine_gains(v)
        return None if gains is None else gains.square() * v

    def cosine_power(self, like: Tensor) -> Tensor | None:
        """About how much of the power of each cosine (*shape) goes into y, which has x's shape; None: not known."""
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
    """A tensor of an operator, kept in every floating-point type and on every device it was asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def at(self, like: Tensor) -> Tensor:
        """The tensor in the type and on the device of another."""
        key = (like.dtype, like.device)
        if key not in self._made:
            self._made[key] = self.tensor.to(like)
        return self._made[key]


class Matrix(Operator):
    """y = M x for a matrix M (m, d), where x has d numbers in any shape, (d,) unless it is given."""

    def __init__(self, matrix: Tensor, shape: Sequence[int] | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"a matrix is a tensor (measurements, numbers), got {_described(matrix)}")
        if not torch.isfinite(matrix).all():
            raise ValueError("the matrix of an operator must be finite")
        event = tuple(shape) if shape is not None else (matrix.shape[1],)
        if math.prod(event) != matrix.shape[1]:
            raise ValueError(f"a matrix with {matrix.shape[1]} columns does not fit x of shape {event}")
        super().__init__(event, (matrix.shape[0],))
        self.matrix = Constant(matrix)

    @in_full_precision
    def _forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.matrix.at(x).mT

    @in_full_precision
    def _adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.matrix.at(y)).reshape(-1, *self.shape)


class FunctionOperator(Operator):
    """A linear function of torch tensors; its adjoint is given, or a vector-Jacobian product by autograd."""

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
        _, pull = torch.func.vjp(self.function, y.new_zeros(len(y), *self.shape))  # type: ignore[misc]  # no has_aux
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
        """Known where every part knows its own: then each number of x reaches one measurement."""
        return self._one_after_another(v, "squares")

    def cosine_squares(self, v: Tensor) -> Tensor | None:
        return self._one_after_another(v, "cosine_squares")

    def _one_after_another(self, v: Tensor, name: str) -> Tensor | None:
        """A structure that every part must know, each from what the part before it leaves."""
        for part in self.parts:
            found = getattr(part, name)(v)
            if found is None:
                return None
            v = found
        return v

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        gains = [part.cosine_gains(like) for part in self.parts]
        known = [one for one in gains if one is not None]
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


def compose(*operators: Any) -> Operator:
    """The operators one after another: compose(blur, smaller) blurs first."""
    if not operators:
        raise ValueError("compose needs at least one operator, got none")
    parts = [as_operator(one) for one in operators]
    return parts[0] if len(parts) == 1 else Composed(*parts)


def linear(
    function: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    adjoint: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
) -> Operator:
    """Any linear torch function of batches (B, *shape) as an operator; without an adjoint autograd gives it.

    It is tried once, on numbers of the type and on the device of `like` (float32 on the CPU), and refused where it is
    not linear.
    """
    return _adapted(function, adjoint, shape, like, getattr(function, "__name__", type(function).__name__))


def as_operator(operator: Any, shape: Sequence[int] | None = None, like: Tensor | None = None) -> Operator:
    """Anything that is an operator, as one of this package; a matrix too. Others' operators are checked here.

    `shape` is that of x, which an object with `A` and `A_adjoint` does not know.
    """
    if isinstance(operator, Operator):
        found = operator
    elif isinstance(operator, Tensor):
        found = Matrix(operator, shape)
    elif hasattr(operator, "A") and hasattr(operator, "A_adjoint"):
        if shape is None:
            raise ValueError(f"the shape of x is needed for {type(operator).__name__}, which does not know it")
        found = _adapted(operator.A, operator.A_adjoint, shape, like, type(operator).__name__)
    elif isinstance(operator, LinearOperator):
        found = _adapted(operator, operator.adjoint, operator.shape, like, type(operator).__name__)
    else:
        raise TypeError(
            f"an operator has shape, out_shape, a call and adjoint (or A and A_adjoint), or is a matrix; got "
            f"{_described(operator)}. A linear function becomes one by mmdgs.operators.linear(function, shape)"
        )
    if shape is not None and found.shape != torch.Size(shape):
        raise UsageError(f"{found!r} does not fit x of shape {tuple(shape)}")
    return found


def _adapted(
    function: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor] | None,
    shape: Sequence[int],
    like: Tensor | None,
    name: str,
) -> Operator:
    """Somebody's function as an operator, checked on numbers drawn from a fixed seed."""
    like = torch.empty(0) if like is None else like
    generator = torch.Generator().manual_seed(CHECK_SEED)
    x = torch.randn(3, *shape, generator=generator).to(like)
    x[2] = 2 * x[0] - 3 * x[1]
    try:
        out = function(x)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be applied to a batch of shape {tuple(x.shape)}: {first_line(error)}"
        ) from error
    if not isinstance(out, Tensor) or out.ndim < 2 or len(out) != len(x) or not out.is_floating_point():
        raise ValueError(f"{name} must give real numbers (B, ...) for a batch (B, ...), got {_described(out)}")
    if not torch.isfinite(out).all():
        raise ValueError(f"{name} gives numbers that are not finite")
    alone = function(x[1:2])
    size = out.abs().amax().clamp(min=torch.finfo(out.dtype).tiny)
    if alone.shape != out[1:2].shape or (alone - out[1:2]).abs().amax() > CHECK_TOLERANCE * size:
        raise ValueError(f"{name} mixes the rows of a batch: each row must be measured for itself")
    if (out[2] - (2 * out[0] - 3 * out[1])).abs().amax() > CHECK_TOLERANCE * size:
        raise ValueError(f"{name} is not linear: A(2 u - 3 v) is not 2 A(u) - 3 A(v)")
    found = FunctionOperator(function, shape, out.shape[1:], adjoint, name)
    y = torch.randn(out.shape, generator=generator).to(out)
    try:
        back = found.adjoint(y)
    except Exception as error:
        raise ValueError(f"the adjoint of {name} cannot be applied to {tuple(y.shape)}: {first_line(error)}") from error
    if back.shape != x.shape:
        raise ValueError(f"the adjoint of {name} must give {tuple(x.shape)}, got {tuple(back.shape)}")
    there, here = (out * y).flatten(1).sum(1), (x * back).flatten(1).sum(1)
    size = out.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1) + x.flatten(1).norm(dim=1) * back.flatten(1).norm(
        dim=1
    )
    if ((there - here).abs() > CHECK_TOLERANCE * size).any():
        raise ValueError(
            f"the adjoint of {name} is wrong: <A x, y> = {there[0].item():g} and <x, A' y> = {here[0].item():g}; "
            "leave it out of mmdgs.operators.linear(function, shape) and autograd gives it"
        )
    return found


def _words(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))


def _described(thing: object) -> str:
    return f"a tensor of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__
