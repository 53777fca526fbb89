"""The public names of mmdgs, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs import (
    data as data,
)
from mmdgs import (
    evaluation as evaluation,
)
from mmdgs import (
    losses as losses,
)
from mmdgs import (
    metrics as metrics,
)
from mmdgs import (
    models as models,
)
from mmdgs import (
    networks as networks,
)
from mmdgs import (
    pretrained as pretrained,
)
from mmdgs import (
    samplers as samplers,
)
from mmdgs import (
    schedules as schedules,
)
from mmdgs import (
    targets as targets,
)
from mmdgs import (
    training as training,
)
from mmdgs.denoisers import (
    Denoiser as Denoiser,
)
from mmdgs.denoisers import (
    clean_denoiser as clean_denoiser,
)
from mmdgs.denoisers import (
    edm_denoiser as edm_denoiser,
)
from mmdgs.denoisers import (
    energy_denoiser as energy_denoiser,
)
from mmdgs.denoisers import (
    noise_denoiser as noise_denoiser,
)
from mmdgs.denoisers import (
    score_denoiser as score_denoiser,
)
from mmdgs.denoisers import (
    velocity_denoiser as velocity_denoiser,
)
from mmdgs.errors import (
    CovarianceTooLargeError as CovarianceTooLargeError,
)
from mmdgs.errors import (
    NonFiniteError as NonFiniteError,
)
from mmdgs.errors import (
    UsageError as UsageError,
)
from mmdgs.fast import (
    fast_path as fast_path,
)
from mmdgs.generation import (
    generate as generate,
)
from mmdgs.generation import (
    sample as sample,
)
from mmdgs.models import (
    Model as Model,
)
from mmdgs.models import (
    ModelConfig as ModelConfig,
)
from mmdgs.models import (
    load as load,
)
from mmdgs.models import (
    save as save,
)
from mmdgs.moments import (
    DiagonalMoments as DiagonalMoments,
)
from mmdgs.moments import (
    ExactMoments as ExactMoments,
)
from mmdgs.moments import (
    FullMoments as FullMoments,
)
from mmdgs.moments import (
    IsotropicMoments as IsotropicMoments,
)
from mmdgs.moments import (
    KrylovMoments as KrylovMoments,
)
from mmdgs.moments import (
    LearnedMoments as LearnedMoments,
)
from mmdgs.moments import (
    Moments as Moments,
)
from mmdgs.moments import (
    OcmMoments as OcmMoments,
)
from mmdgs.moments import (
    SpectralMoments as SpectralMoments,
)
from mmdgs.moments.probes import (
    Lattice as Lattice,
)
from mmdgs.moments.probes import (
    Rademacher as Rademacher,
)
from mmdgs.noise import (
    CLEAN as CLEAN,
)
from mmdgs.noise import (
    NoiseLevel as NoiseLevel,
)
from mmdgs.noise import (
    NoiseLevels as NoiseLevels,
)
from mmdgs.noise import (
    add_noise as add_noise,
)
from mmdgs.posterior import (
    Gaussian as Gaussian,
)
from mmdgs.pretrained import (
    Pretrained as Pretrained,
)
from mmdgs.pretrained import (
    from_pretrained as from_pretrained,
)
from mmdgs.pretrained import (
    load_head as load_head,
)
from mmdgs.randomness import (
    Streams as Streams,
)
from mmdgs.samplers import (
    ExactGibbs as ExactGibbs,
)
from mmdgs.samplers import (
    Gibbs as Gibbs,
)
from mmdgs.samplers import (
    gibbs_chain as gibbs_chain,
)
from mmdgs.samplers import (
    gibbs_plan as gibbs_plan,
)
from mmdgs.samplers import (
    run as run,
)
from mmdgs.samplers import (
    run_plan as run_plan,
)
from mmdgs.version import (
    __version__ as __version__,
)
