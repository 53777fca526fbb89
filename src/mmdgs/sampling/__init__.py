"""Many samples of a model, returned or written as they come; samplers by name."""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
