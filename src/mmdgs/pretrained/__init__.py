"""Pretrained networks as denoisers: NCSNv2, diffusers, EDM and our own; and a scheduler for pipelines of diffusers."""

from typing import TYPE_CHECKING, Any

from mmdgs.pretrained.loading import from_pretrained
from mmdgs.pretrained.pretrained import Pretrained

if TYPE_CHECKING:
    from mmdgs.pretrained.scheduler import MomentScheduler

__all__ = ["MomentScheduler", "Pretrained", "from_pretrained"]


def __getattr__(name: str) -> Any:
    """MomentScheduler is imported when it is asked for: diffusers is optional, and slow to import."""
    if name == "MomentScheduler":
        from mmdgs.pretrained.scheduler import MomentScheduler

        return MomentScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
