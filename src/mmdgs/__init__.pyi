"""The public names of mmdgs, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs import (
    data as data,
    diagnostics as diagnostics,
    evaluation as evaluation,
    interop as interop,
    losses as losses,
    metrics as metrics,
    models as models,
    networks as networks,
    operators as operators,
    samplers as samplers,
    schedules as schedules,
    targets as targets,
    training as training,
)
from mmdgs.compiled import (
    fast_path as fast_path,
)
from mmdgs.denoisers import (
    Denoiser as Denoiser,
    clean_denoiser as clean_denoiser,
    edm_denoiser as edm_denoiser,
    energy_denoiser as energy_denoiser,
    noise_denoiser as noise_denoiser,
    score_denoiser as score_denoiser,
    velocity_denoiser as velocity_denoiser,
)
from mmdgs.errors import (
    CovarianceTooLargeError as CovarianceTooLargeError,
    NonFiniteError as NonFiniteError,
    UsageError as UsageError,
)
from mmdgs.generation import (
    ImagePosterior as ImagePosterior,
    Method as Method,
    PosteriorSettings as PosteriorSettings,
    Restored as Restored,
    generate as generate,
    image_posterior as image_posterior,
    restore as restore,
)
from mmdgs.guidance import (
    GuidedDenoiser as GuidedDenoiser,
)
from mmdgs.linalg.components import (
    Components as Components,
)
from mmdgs.models import (
    FitData as FitData,
    Model as Model,
    ModelConfig as ModelConfig,
    calibrate as calibrate,
    from_pretrained as from_pretrained,
    load as load,
    load_head as load_head,
    save as save,
)
from mmdgs.moments import (
    CalibratedMoments as CalibratedMoments,
    DiagonalMoments as DiagonalMoments,
    ExactMoments as ExactMoments,
    FullMoments as FullMoments,
    GivenMoments as GivenMoments,
    HigherMoments as HigherMoments,
    IsotropicMoments as IsotropicMoments,
    KrylovMoments as KrylovMoments,
    LearnedMoments as LearnedMoments,
    LowRankMoments as LowRankMoments,
    ModulatedMoments as ModulatedMoments,
    Moments as Moments,
    OcmMoments as OcmMoments,
    SpectralMoments as SpectralMoments,
    components as components,
    higher_moments as higher_moments,
)
from mmdgs.moments.probes import (
    Lattice as Lattice,
    Rademacher as Rademacher,
)
from mmdgs.noise import (
    CLEAN as CLEAN,
    LevelTable as LevelTable,
    NoiseLevel as NoiseLevel,
    NoiseLevels as NoiseLevels,
    add_noise as add_noise,
)
from mmdgs.posterior import (
    Gaussian as Gaussian,
)
from mmdgs.randomness import (
    Streams as Streams,
)
from mmdgs.samplers import (
    ExactGibbs as ExactGibbs,
    Gibbs as Gibbs,
    gibbs_chain as gibbs_chain,
    gibbs_plan as gibbs_plan,
    run as run,
)
from mmdgs.version import (
    __version__ as __version__,
)
