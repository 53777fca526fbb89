"""Covariance operators: diagonal, dense, spectral, modulated, Krylov, low rank, conditioned."""

from mmdgs.linalg.given import Given, conditioned
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Modulated, Spectral

# fmt: off
__all__ = [
    "Covariance", "Dense", "Diagonal", "Given", "Krylov", "LowRank", "Modulated", "Spectral",
    "conditioned",
]
# fmt: on
