"""Covariance operators: diagonal, dense, spectral, Krylov, and given measurements."""

from mmdgs.linalg.given import Given, conditioned
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Spectral

__all__ = ["Covariance", "Dense", "Diagonal", "Given", "Krylov", "Spectral", "conditioned"]
