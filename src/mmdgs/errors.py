"""The exceptions of mmdgs, each with a message that names the value, what was expected and what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


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
    """A value from outside for a message: as repr writes it, and cut short where it is large or deeply nested."""
    return _Short().repr(value)


class UsageError(ValueError):
    """A request that cannot be carried out as it was made (command line: exit status 2)."""


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean ...?)" where one of the names is like this one, whatever their case; else ""."""
    by_case = {one.lower(): one for one in names}
    like = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f" (did you mean {by_case[like[0]]!r}?)" if like else ""


def unknown_name(what: str, name: str, names: Iterable[str], *, choose: str = "choose one of") -> UsageError:
    """The error for a name that is none of `names`: it suggests the nearest and lists all."""
    names = list(names)
    return UsageError(f"unknown {what} {name!r}{nearest(name, names)}; {choose} {', '.join(names)}")


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
        advice: str = "check the network for NaN weights, and that the noise level is the one it was trained at",
    ) -> None:
        self.what = what
        self.chains = chains
        self.step = step
        self.advice = advice
        shown = ", ".join(map(str, chains[:8])) + (", ..." if len(chains) > 8 else "")
        where = [] if step is None else [f"step {step}"]
        where += [f"chain {shown}"] if chains else []
        super().__init__(f"the {what} is not finite at {', '.join(where)}; {advice}")
