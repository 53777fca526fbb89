"""Numbers that say how good samples and posteriors are, and tests of densities on grids.

The public names are in __init__.pyi. Each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
