"""Covariance operators: diagonal, dense, spectral, Krylov."""

from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Spectral

__all__ = ["Covariance", "Dense", "Diagonal", "Krylov", "Spectral"]
