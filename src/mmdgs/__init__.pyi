"""The public names of mmdgs, and where each lives: read by type checkers, and by __init__.py.

Names for experts stay in the subpackages.
"""

from mmdgs import (
    compiled as compiled,
    covariances as covariances,
    data as data,
    denoisers as denoisers,
    diagnostics as diagnostics,
    errors as errors,
    evaluation as evaluation,
    guidance as guidance,
    interop as interop,
    jacobians as jacobians,
    linalg as linalg,
    losses as losses,
    metrics as metrics,
    models as models,
    moments as moments,
    networks as networks,
    noise as noise,
    operators as operators,
    posterior as posterior,
    randomness as randomness,
    reading as reading,
    restoration as restoration,
    samplers as samplers,
    sampling as sampling,
    schedules as schedules,
    sensors as sensors,
    targets as targets,
    training as training,
    uncertainty as uncertainty,
)
from mmdgs.denoisers import (
    Denoiser as Denoiser,
    blind_denoiser as blind_denoiser,
    clean_denoiser as clean_denoiser,
    edm_denoiser as edm_denoiser,
    energy_denoiser as energy_denoiser,
    noise_denoiser as noise_denoiser,
    score_denoiser as score_denoiser,
    velocity_denoiser as velocity_denoiser,
)
from mmdgs.errors import NonFiniteError as NonFiniteError, UsageError as UsageError
from mmdgs.models import (
    FitData as FitData,
    Model as Model,
    calibrate as calibrate,
    load as load,
    save as save,
)
from mmdgs.moments import (
    DiagonalMoments as DiagonalMoments,
    FullMoments as FullMoments,
    IsotropicMoments as IsotropicMoments,
    KrylovMoments as KrylovMoments,
    LearnedMoments as LearnedMoments,
    LowRankMoments as LowRankMoments,
    ModulatedMoments as ModulatedMoments,
    Moments as Moments,
    OcmMoments as OcmMoments,
    SpectralMoments as SpectralMoments,
)
from mmdgs.noise import CLEAN as CLEAN, NoiseLevel as NoiseLevel, add_noise as add_noise
from mmdgs.posterior import Gaussian as Gaussian
from mmdgs.restoration.draws import restore as restore
from mmdgs.restoration.evidence import Evidence as Evidence, evidence as evidence
from mmdgs.samplers import Gibbs as Gibbs, gibbs_chain as gibbs_chain
from mmdgs.sampling import SamplerSettings as SamplerSettings, generate as generate
from mmdgs.uncertainty.image import image_posterior as image_posterior
from mmdgs.uncertainty.settings import PosteriorSettings as PosteriorSettings
from mmdgs.version import __version__ as __version__
