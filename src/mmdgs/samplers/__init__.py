"""Samplers: small step kernels, plans that say which kernel at which levels, and the one runner."""

from mmdgs.samplers.ancestral import Ancestral, FixedVariance, Mirrored
from mmdgs.samplers.deterministic import DDIM, Denoise, Heun, Multistep
from mmdgs.samplers.driver import Run, gibbs_chain, run
from mmdgs.samplers.gibbs import ExactGibbs, Gibbs, GibbsFromAbove, GibbsMean
from mmdgs.samplers.kernel import Info, Kernel, State
from mmdgs.samplers.langevin import ConsistentAnnealed, Langevin
from mmdgs.samplers.metropolis import MetropolisGibbs
from mmdgs.samplers.particles import TwistedParticles
from mmdgs.samplers.plans import (
    Plan,
    Step,
    ancestral_plan,
    gibbs_plan,
    langevin_plan,
    single_level_plan,
)

# fmt: off
__all__ = [
    "DDIM", "Ancestral", "ConsistentAnnealed", "Denoise", "ExactGibbs", "FixedVariance", "Gibbs",
    "GibbsFromAbove", "GibbsMean", "Heun", "Info", "Kernel", "Langevin", "MetropolisGibbs",
    "Mirrored", "Multistep", "Plan", "Run", "State", "Step", "TwistedParticles", "ancestral_plan",
    "gibbs_chain", "gibbs_plan", "langevin_plan", "run", "single_level_plan",
]
# fmt: on
