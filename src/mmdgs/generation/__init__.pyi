"""The public names of mmdgs.generation, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs.generation.engine import (
    Generated as Generated,
    generate as generate,
)
from mmdgs.generation.methods import (
    SAMPLERS as SAMPLERS,
    make_plan as make_plan,
    resolved as resolved,
)
from mmdgs.generation.posteriors import (
    ImagePosterior as ImagePosterior,
    PosteriorSettings as PosteriorSettings,
    image_posterior as image_posterior,
)
from mmdgs.generation.restoration import (
    Restored as Restored,
    restore as restore,
)
from mmdgs.generation.settings import (
    Method as Method,
)
