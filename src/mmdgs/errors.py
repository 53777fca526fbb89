"""The exceptions of mmdgs; messages name the value, what was expected and what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Short(reprlib.Repr):
    """repr in bounded time: a few items, three levels deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 12, 12, 12
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 512 else f"a whole number of {x.bit_length():,} bits"


def shown(value: object) -> str:
    """A value from outside for a message: its repr, cut short where it is large or nested."""
    return _Short().repr(value)


class UsageError(ValueError):
    """A request that cannot be carried out as it was made (command line: exit status 2)."""


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean ...?)" where one of the names is like this one, else ""."""
    by_case = {candidate.lower(): candidate for candidate in names}
    like = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f" (did you mean {by_case[like[0]]!r}?)" if like else ""


def unknown_name(
    what: str, name: str, names: Iterable[str], *, choose: str = "choose one of"
) -> UsageError:
    """The error for a name that is none of `names`: it suggests the nearest and lists all."""
    names = list(names)
    return UsageError(f"unknown {what} {name!r}{nearest(name, names)}; {choose} {', '.join(names)}")


def require_shape(what: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse a tensor of another shape, which would broadcast unseen."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{what} must have shape {tuple(expected)}, got {tuple(shape)}")


class CovarianceTooLargeError(UsageError, MemoryError):
    """A dense covariance, or a Krylov basis, that would not fit in memory."""


class NonFiniteError(ArithmeticError):
    """A mean, covariance or state that became NaN or infinite.

    `chains` holds the rows of the batch it happened in; `step` is filled in by the driver.
    """

    def __init__(
        self,
        what: str,
        chains: list[int],
        step: int | None = None,
        advice: str = "check the network for NaN weights, and that it was trained at this level",
    ) -> None:
        self.what, self.chains, self.step, self.advice = what, chains, step, advice
        where = [] if step is None else [f"step {step}"]
        if chains:
            rows = ", ".join(map(str, chains[:8])) + (", ..." if len(chains) > 8 else "")
            where.append(f"chain {rows}")
        super().__init__(f"the {what} is not finite at {', '.join(where)}; {advice}")
