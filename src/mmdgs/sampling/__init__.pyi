"""The public names of mmdgs.sampling: read by type checkers, and by __init__.py."""

from mmdgs.sampling.engine import Generated as Generated, generate as generate
from mmdgs.sampling.named import SAMPLERS as SAMPLERS, make_plan as make_plan, resolved as resolved
from mmdgs.sampling.settings import SamplerSettings as SamplerSettings
