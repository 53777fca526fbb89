"""Covariance operators: diagonal, dense, spectral, modulated, Krylov, and given measurements."""

from mmdgs.linalg.given import Given, conditioned
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.modulated import Modulated
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Spectral

__all__ = ["Covariance", "Dense", "Diagonal", "Given", "Krylov", "Modulated", "Spectral", "conditioned"]
