"""Pretrained networks as denoisers: NCSNv2, diffusers, EDM and our own; heads for them; a scheduler for diffusers."""

from typing import TYPE_CHECKING, Any

from mmdgs.pretrained.heads import head_digest, load_head
from mmdgs.pretrained.loading import from_pretrained
from mmdgs.pretrained.pretrained import Pretrained

if TYPE_CHECKING:
    from mmdgs.pretrained.scheduler import MomentScheduler

__all__ = ["MomentScheduler", "Pretrained", "from_pretrained", "head_digest", "load_head"]


def __getattr__(name: str) -> Any:
    """MomentScheduler is imported when it is asked for: diffusers is optional, and slow to import."""
    if name == "MomentScheduler":
        from mmdgs.pretrained.scheduler import MomentScheduler

        return MomentScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
