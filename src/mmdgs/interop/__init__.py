"""Guests of other libraries: a scheduler for pipelines of diffusers. Each is imported when it is asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdgs.interop.diffusers import MomentScheduler

__all__ = ["MomentScheduler"]


def __getattr__(name: str) -> Any:
    """MomentScheduler is imported when it is asked for: diffusers is optional, and slow to import."""
    if name == "MomentScheduler":
        from mmdgs.interop.diffusers import MomentScheduler

        return MomentScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
