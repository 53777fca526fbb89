"""Samples against data: Fréchet and kernel distance, precision and recall, Inception score.

Images are judged as they would be stored, in 256 levels. Every number depends on how many samples
there are: evaluations of different counts are not compared (`check_comparable`).

The public names are in __init__.pyi. Each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
