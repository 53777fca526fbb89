"""Numbers that say how good samples, chains, draws and posteriors are (names: __init__.pyi)."""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
