"""Samplers: small step kernels, and the one driver that runs them along a path of noise levels."""

from mmdgs.samplers.driver import Run, gibbs_chain, run
from mmdgs.samplers.gibbs import ExactGibbs, Gibbs
from mmdgs.samplers.kernel import Info, Kernel, State

__all__ = ["ExactGibbs", "Gibbs", "Info", "Kernel", "Run", "State", "gibbs_chain", "run"]
