"""Guests of other libraries: a scheduler for diffusers, denoisers for azula, denoiser and
reconstructor for deepinv.

The public names are in __init__.pyi. Each is imported when it is first used: the other libraries
are optional, and slow to import.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
