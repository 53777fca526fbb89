"""deepinv's solvers of inverse problems (pip install mmdgs[deepinv]), run by its own code; see rivals.py.

    deepinv moment matching    PosteriorDiffusion as in deepinv's demonstration of it: variance exploding, alpha 0.25,
                               Euler's steps, conjugate gradients
    deepinv DPS                DDPM's steps along its variance-preserving schedule
    deepinv DiffPIR            proximal steps on the data, with the weight lambda
    deepinv DDRM               by the singular values of the operator

Settings are deepinv's defaults: iterations of the conjugate gradients, weight of the fidelity, lambda, eta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.operators import Operator

DEFAULTS: dict[str, float] = {
    "deepinv moment matching": 3,
    "deepinv DPS": 1.0,
    "deepinv DiffPIR": 7.0,
    "deepinv DDRM": 0.85,
}
TRIED: dict[str, tuple[float, ...]] = {
    "deepinv moment matching": (1, 2, 3, 5, 8, 12, 20),
    "deepinv DPS": (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    "deepinv DiffPIR": (1.0, 3.0, 7.0, 15.0, 30.0),
    "deepinv DDRM": (0.0, 0.25, 0.5, 0.7, 0.85, 1.0),
}
BOUNDS: dict[str, tuple[float, ...]] = {"deepinv moment matching": (1,), "deepinv DDRM": (0.0, 1.0)}
SETTING = {
    "deepinv moment matching": "iterations",
    "deepinv DPS": "weight",
    "deepinv DiffPIR": "lambda",
    "deepinv DDRM": "eta",
}
STEPS = {"deepinv moment matching": 50, "deepinv DPS": 1000, "deepinv DiffPIR": 100, "deepinv DDRM": 100}
"""deepinv's default; for moment matching that of its demonstration."""
CPU = torch.device("cpu")
MOST_DECOMPOSED = 4096
"""Numbers of an image up to which an operator is decomposed: a minute on two cores."""


@dataclass(frozen=True)
class Solved:
    """What a solver is made of: the denoiser and its interval, operator and noise, the steps and the one setting."""

    denoiser: Denoiser
    interval: tuple[float, float]
    operator: Operator
    noise: float
    steps: int
    setting: float
    device: torch.device = CPU

    @property
    def guest(self) -> Any:
        """The denoiser as deepinv's."""
        from mmdgs.interop.deepinv import GuestDenoiser

        return GuestDenoiser(self.denoiser, self.interval)

    def draw(self, name: str, y: Tensor, seed: int) -> Tensor:
        """A draw of each row of y, measurements of images in [0, 1]."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return _SOLVERS[name](self)(y).detach().to(y)


def _moment_matching(given: Solved) -> Callable[[Tensor], Tensor]:
    from deepinv.sampling import EulerSolver, MomentMatchingDataFidelity, VarianceExplodingDiffusion

    times = torch.linspace(1.0, 0.001, given.steps, dtype=torch.float64, device=given.device)
    fidelity = MomentMatchingDataFidelity(cg_max_iter=int(given.setting))
    return _diffusion(given, fidelity, VarianceExplodingDiffusion(alpha=0.25, device=given.device), EulerSolver(times))


def _diffusion(given: Solved, fidelity: Any, sde: Any, solver: Any) -> Callable[[Tensor], Tensor]:
    from deepinv.sampling import PosteriorDiffusion

    sampler = PosteriorDiffusion(fidelity, given.guest, sde, solver, device=given.device)
    return lambda y: sampler(y, _physics(given), x_init=(len(y), *given.operator.shape))


def _dps(given: Solved) -> Callable[[Tensor], Tensor]:
    from deepinv.sampling import DPS

    sampler = DPS(given.guest, num_steps=given.steps, weight=given.setting, device=given.device)
    return lambda y: sampler(y, _physics(given), x_init=(len(y), *given.operator.shape))


def _diffpir(given: Solved) -> Callable[[Tensor], Tensor]:
    from deepinv.optim.data_fidelity import L2
    from deepinv.sampling import DiffPIR

    sampler = DiffPIR(
        given.guest, L2(), sigma=given.noise, max_iter=given.steps, lambda_=given.setting, device=given.device
    )
    return lambda y: sampler(y, _physics(given))


def _ddrm(given: Solved) -> Callable[[Tensor], Tensor]:
    from deepinv.sampling import DDRM

    sampler = DDRM(given.guest, sigmas=np.linspace(1, 0, given.steps), eta=given.setting)
    return lambda y: sampler(y.flatten(1), _decomposed(given))


def _physics(given: Solved) -> Any:
    from mmdgs.interop.deepinv import to_physics

    return to_physics(given.operator, given.noise).to(given.device)


def _decomposed(given: Solved) -> Any:
    """The operator by its singular values: A = U diag(s) V', with as many coefficients as numbers of an image."""
    from deepinv.physics import DecomposablePhysics, GaussianNoise

    shape, d = given.operator.shape, math.prod(given.operator.shape)
    if d > MOST_DECOMPOSED:
        raise UsageError(f"DDRM decomposes the operator, and images of {d} numbers are too large for that")
    a = given.operator(torch.eye(d, device=given.device).reshape(d, *shape)).flatten(1).mT.double()
    u, s, v = torch.linalg.svd(a, full_matrices=True)
    known = min(len(s), d)
    values = torch.zeros(1, d, device=given.device)
    values[0, :known] = s[:known].float()
    left = torch.zeros(d, len(a), device=given.device)
    left[:known] = u.mT[:known].float()
    right = v.float()  # rows are the singular vectors
    return DecomposablePhysics(
        U=lambda c: c @ left,
        U_adjoint=lambda y: y @ left.mT,
        V_adjoint=lambda x: x.flatten(1) @ right.mT,
        V=lambda c: (c @ right).reshape(-1, *shape),
        mask=values,
        img_size=(d,),
        noise_model=GaussianNoise(given.noise),
        device=given.device,
    )


_SOLVERS: dict[str, Callable[[Solved], Callable[[Tensor], Tensor]]] = {
    "deepinv moment matching": _moment_matching,
    "deepinv DPS": _dps,
    "deepinv DiffPIR": _diffpir,
    "deepinv DDRM": _ddrm,
}
