"""Guests of other libraries: a scheduler for diffusers, denoisers for azula, denoiser and reconstructor for deepinv.

Each is imported when it is asked for: the other libraries are optional, and slow to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdgs.interop.azula import from_azula, to_azula
    from mmdgs.interop.deepinv import CovarianceFidelity, Restorer, to_deepinv, to_physics
    from mmdgs.interop.diffusers import MomentScheduler

__all__ = [
    "CovarianceFidelity",
    "MomentScheduler",
    "Restorer",
    "from_azula",
    "to_azula",
    "to_deepinv",
    "to_physics",
]

_NAMES = {
    "azula": ("from_azula", "to_azula"),
    "deepinv": ("CovarianceFidelity", "Restorer", "to_deepinv", "to_physics"),
    "diffusers": ("MomentScheduler",),
}
_HOMES = {name: library for library, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A guest, from the module of the library that it is for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
