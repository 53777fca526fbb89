"""Samples of a model by any plan, returned or written as they come; samplers by name.

The public names are in __init__.pyi. Each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
