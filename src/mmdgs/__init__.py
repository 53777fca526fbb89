"""mmdgs: from a denoiser to the denoising posterior p(x | noisy x), and from that posterior to samplers.

Zhang, Hawkins-Hooker, Paige and Barber, "Moment Matching Denoising Gibbs Sampling", NeurIPS 2023.
"""

from mmdgs import (
    data,
    evaluation,
    losses,
    metrics,
    networks,
    pretrained,
    samplers,
    sampling,
    schedules,
    targets,
    training,
    watching,
)
from mmdgs.denoisers import (
    Denoiser,
    clean_denoiser,
    edm_denoiser,
    energy_denoiser,
    noise_denoiser,
    score_denoiser,
    velocity_denoiser,
)
from mmdgs.errors import CovarianceTooLargeError, NonFiniteError, UsageError
from mmdgs.fast import fast_path
from mmdgs.models import Model, ModelConfig, load, save
from mmdgs.moments import (
    DiagonalMoments,
    ExactMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    LearnedMoments,
    Moments,
)
from mmdgs.noise import CLEAN, NoiseLevel, NoiseLevels, add_noise
from mmdgs.ocm import OcmMoments
from mmdgs.posterior import Gaussian
from mmdgs.pretrained import Pretrained, from_pretrained, load_head
from mmdgs.probes import Lattice, Rademacher
from mmdgs.randomness import Streams
from mmdgs.samplers import ExactGibbs, Gibbs, gibbs_chain, gibbs_plan, run, run_plan
from mmdgs.sampling import generate, sample
from mmdgs.spectral import SpectralMoments
from mmdgs.version import __version__

__all__ = [
    "CLEAN",
    "CovarianceTooLargeError",
    "Denoiser",
    "DiagonalMoments",
    "ExactGibbs",
    "ExactMoments",
    "FullMoments",
    "Gaussian",
    "Gibbs",
    "IsotropicMoments",
    "KrylovMoments",
    "Lattice",
    "LearnedMoments",
    "Model",
    "ModelConfig",
    "Moments",
    "NoiseLevel",
    "NoiseLevels",
    "NonFiniteError",
    "OcmMoments",
    "Pretrained",
    "Rademacher",
    "SpectralMoments",
    "Streams",
    "UsageError",
    "__version__",
    "add_noise",
    "clean_denoiser",
    "data",
    "edm_denoiser",
    "energy_denoiser",
    "evaluation",
    "fast_path",
    "from_pretrained",
    "generate",
    "gibbs_chain",
    "gibbs_plan",
    "load",
    "load_head",
    "losses",
    "metrics",
    "networks",
    "noise_denoiser",
    "pretrained",
    "run",
    "run_plan",
    "sample",
    "samplers",
    "sampling",
    "save",
    "schedules",
    "score_denoiser",
    "targets",
    "training",
    "velocity_denoiser",
    "watching",
]
