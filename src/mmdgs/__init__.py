"""mmdgs: from a denoiser to the denoising posterior p(x | noisy x), and from that to samplers.

Zhang, Hawkins-Hooker, Paige and Barber, "Moment Matching Denoising Gibbs Sampling", NeurIPS 2023.

The public names are in __init__.pyi; each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names
from mmdgs.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
