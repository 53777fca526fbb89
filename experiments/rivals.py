"""Other people's solvers of inverse problems, run by their own code: what `restore` competes with.

azula's (pip install mmdgs[azula]; on PYTHONPATH it needs einops and tqdm beside torch):

    MMPS     Rozet et al., 2024: GMRES on products with the Jacobian, DDPM's steps
    PiGDM    Song et al., 2023: for noisy measurements A^+ is r^2 A' (r^2 A A' + tau^2)^-1 with the
             paper's r^2 = ratio^2 / (1 + ratio^2)
    DPS      Chung et al., 2023: the norm of each draw's own residual, as in the paper; azula's is
             that of the batch
    DiffPIR by azula    as below, the proximal step solved and all noise drawn anew

These go down azula's variance-preserving schedule, with data in [-1, 1]. Each has one setting, at
azula's default unless it is given, and `TRIED` are the values of a search (`tuned`): iterations of
the solver, DDIM's eta, the step zeta.

deepinv's (pip install mmdgs[deepinv]; on PYTHONPATH it needs einops, natsort, torchvision and
torchmetrics):

    DiffPIR  Zhu et al., 2023: a proximal step on the data at each level; lambda
    DPIR     Zhang et al., 2021: plug and play, half-quadratic splitting from 49/255 down to a sigma
             near the noise. One restoration and no draws: all are alike. Its setting is that sigma,
             in units of the noise
    DDRM     Kawar et al., 2022: in the singular vectors of A, for measurements of vectors; eta
    deepinv moment matching    PosteriorDiffusion as in deepinv's demonstration of it: variance
             exploding, alpha 0.25, Euler's steps; iterations of conjugate gradients. bench.py has
             its time
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdgs.cost import Cost
from mmdgs.denoisers import Denoiser
from mmdgs.derivatives import load_forward_mode
from mmdgs.errors import unknown_name
from mmdgs.linalg.operators import Diagonal
from mmdgs.memory import Batches
from mmdgs.metrics import crps
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Operator, as_operator, measured, noise_variances
from mmdgs.posterior import Gaussian
from mmdgs.randomness import child_seed
from mmdgs.restoration.checks import check_model
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.runtime import autocast
from mmdgs.sampling.engine import chains_at_once
from mmdgs.schedules import edm

PIR = "DiffPIR by azula"
AZULA = ("MMPS", "PiGDM", "DPS", PIR)
MATCHING = "deepinv moment matching"
DEFAULTS: dict[str, float] = {
    **{"MMPS": 1, "PiGDM": 0.0, "DPS": 1.0, PIR: 10.0},
    **{"DiffPIR": 7.0, "DPIR": 1.0, "DDRM": 0.85, MATCHING: 3},
}
"""The libraries' own values of the one setting."""
STEPS = {**dict.fromkeys(AZULA, 64), "DiffPIR": 100, "DPIR": 8, "DDRM": 100, MATCHING: 50}
"""The libraries' own numbers of steps; that of DPIR is fixed."""
TRIED: dict[str, tuple[float, ...]] = {
    "MMPS": (1, 2, 3, 5, 8, 12, 20),
    "PiGDM": (0.0, 0.25, 0.5, 0.75, 1.0),
    "DPS": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "DiffPIR": (1.0, 3.0, 7.0, 15.0, 30.0),
    "DPIR": (0.5, 0.7, 1.0, 1.4, 2.0),
    PIR: (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    "DDRM": (0.0, 0.25, 0.5, 0.7, 0.85, 0.95, 1.0),
}
BOUNDS: dict[str, tuple[float, ...]] = {"MMPS": (1,), "PiGDM": (0.0, 1.0), "DDRM": (0.0, 1.0)}
"""Ends that the method itself sets: no search can go on beyond them."""

PROXIMAL, DDRM_LAST = 16, 0.01
"""GMRES' iterations of azula's DiffPIR; DDRM's last level but one, along EDM's."""
GRAPH = 4
"""How many times the memory of a forward pass a pass with its graph takes, about."""


def installed(name: str = AZULA[0]) -> bool:
    """Whether the code of a rival can be imported; True for what is no rival."""
    library = "azula" if name in AZULA else "deepinv"
    return name not in DEFAULTS or importlib.util.find_spec(library) is not None


KEPT: list[torch.library.Library] = []


def load_deepinv() -> Any:
    """deepinv, imported after torchvision.

    torchvision's wheel beside a CPU build of torch lacks three operators, which nothing here calls:
    they are declared, for as long as `KEPT` holds them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        KEPT.append(torch.library.Library("torchvision", "DEF"))
        pooling = "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
        for operator in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            f"roi_align(Tensor input, Tensor rois, float scale, int pooled_height, {pooling}",
        ):
            KEPT[0].define(operator)
    return importlib.import_module("deepinv")


def left_out(library: str = "azula", name: str = AZULA[0]) -> list[str]:
    """A sentence for a report without a library's rivals, one of which has this name."""
    brings = f"pip install mmdgs[{library}] brings them"
    return [] if installed(name) else [f"The methods of {library} are left out: {brings}."]


def settings_said(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the tuned settings, by the record of each cell."""
    said = [
        f"{cell['row']}, {cell['task']}: {cell['setting']:g}"
        + (" (an end of the search)" if cell["at_edge"] else "")
        for cell in records
        if cell.get("setting") is not None
    ]
    words = "Settings of the rivals, by the least CRPS on other measurements."
    return [f"{words} {'; '.join(said)}."] if said else []


@dataclass
class Counted:
    """A denoiser with a count of its evaluations and products, and the last level it was at.

    The `precision` is the network's: a rival's own algebra stays in float32.
    """

    denoiser: Denoiser
    cost: Cost = field(default_factory=Cost)
    level: NoiseLevel | None = None
    precision: str = "float32"

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        self.cost.forwards += 1
        self.level = level
        with autocast(self.precision, x_t.device):
            return self.denoiser(_CountProducts.apply(x_t, self.cost), level).to(x_t.dtype)


class _CountProducts(torch.autograd.Function):
    """The identity; a product with the Jacobian after it goes through its backward pass once."""

    @staticmethod
    def forward(x: Tensor, cost: Cost) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Cost], output: Tensor) -> None:
        ctx.cost = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.cost.products += 1
        return gradient, None


@dataclass(frozen=True)
class Problem:
    """Rows of measurements y = A u + tau e of u about as wide as [-1, 1], and u's denoiser."""

    counted: Counted  # the denoiser of x = centre + scale u
    y: Tensor
    operator: Operator
    tau: float
    noisiest: float  # ratio sigma / alpha of the schedule's end
    centre: float = 0.0
    scale: float = 1.0

    def a(self, u: Tensor) -> Tensor:
        """A u, flat: azula's solvers take the last dimension alone for the measurements."""
        return self.operator(u).flatten(1)

    def pseudo_inverse(self, flat: Tensor, variance: float) -> Tensor:
        """v A' (v A A' + tau^2)^-1 y: the best linear estimate of u with N(0, v I)."""
        y = flat.reshape(-1, *self.operator.out_shape)
        zero = y.new_zeros(len(y), *self.operator.shape)
        prior = Gaussian(zero, Diagonal(zero.new_tensor(variance).expand_as(zero)))
        return prior.given(y, self.operator, self.tau).mean

    def draw(self, name: str, steps: int, setting: float, seed: int) -> Tensor:
        """A draw of each row by the solver of a name."""
        if name == "DDRM":
            return _ddrm(self, steps, setting, seed)
        from mmdgs.interop.azula import GuestDenoiser, default_schedule

        load_forward_mode()
        schedule = default_schedule(self.noisiest)
        guest = GuestDenoiser(self.counted, schedule, None, self.centre, self.scale)
        sampler = _SAMPLERS[name](self, guest, setting, {"steps": steps, "silent": True})
        sampler.dtype = torch.float64  # of times
        shape, device = (len(self.y), *self.operator.shape), self.y.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            start = sampler.init(shape, device=device, dtype=self.y.dtype)
            return sampler(start).detach()


def _mmps(problem: Problem, guest: Any, iterations: float, settings: dict[str, Any]) -> Any:
    from azula.guidance import MMPSDenoiser
    from azula.linalg.covariance import IsotropicCovariance
    from azula.sample import DDPMSampler

    known = (problem.y.flatten(1), problem.a, IsotropicCovariance(problem.tau**2))
    return DDPMSampler(MMPSDenoiser(guest, *known, iterations=int(iterations)), **settings)


def _pigdm(problem: Problem, guest: Any, eta: float, settings: dict[str, Any]) -> Any:
    from azula.guidance import PGDMSampler

    def inverse(y: Tensor) -> Tensor:
        level = problem.counted.level
        assert level is not None  # azula asks for it after the denoiser
        variance = level.variance / problem.scale**2
        return problem.pseudo_inverse(y, variance / (1 + variance))

    return PGDMSampler(guest, problem.y.flatten(1), problem.a, inverse, eta=eta, **settings)


def _dps(problem: Problem, guest: Any, zeta: float, settings: dict[str, Any]) -> Any:
    from azula.guidance import DPSSampler

    y = problem.y.flatten(1)

    def a(u: Tensor) -> Tensor:
        """A u; it sets the step of each row to what it would be if the row were alone."""
        flat = problem.a(u)
        rows = (y - flat.detach()).norm(dim=1)
        sampler.zeta = (zeta * rows.norm() / rows).reshape(-1, *[1] * (u.ndim - 1))
        return flat

    sampler = DPSSampler(guest, y, a, zeta, **settings)
    return sampler


def _azula_diffpir(problem: Problem, guest: Any, lmbda: float, settings: dict[str, Any]) -> Any:
    from azula.guidance import DiffPIRDenoiser
    from azula.sample import DDPMSampler

    known = (problem.y.flatten(1), problem.a, problem.tau**2)
    solved = {"lmbda": lmbda, "iterations": PROXIMAL}
    return DDPMSampler(DiffPIRDenoiser(guest, *known, **solved), **settings)


def _ddrm(problem: Problem, steps: int, eta: float, seed: int) -> Tensor:
    """Draws of vectors by deepinv, from the noisiest level down to 0."""
    load_deepinv()
    from deepinv.physics import DecomposablePhysics, GaussianNoise
    from deepinv.sampling import DDRM

    from mmdgs.interop.deepinv import GuestDenoiser

    y, (d,) = problem.y, problem.operator.shape
    u, s, v = torch.linalg.svd(problem.operator(torch.eye(d).to(y)).mT)
    u, rest = u[:, : len(s)], (0, d - len(s))
    physics = DecomposablePhysics(
        U_adjoint=lambda y: torch.nn.functional.pad(y @ u, rest), U=lambda y: y[:, : len(s)] @ u.mT,
        V=lambda x: x @ v, V_adjoint=lambda x: x @ v.mT, noise_model=GaussianNoise(problem.tau),
        mask=torch.nn.functional.pad(s, rest)[None],
    )  # fmt: skip
    scale = problem.scale
    own = GuestDenoiser(problem.counted, (problem.centre, problem.centre + scale))
    sigmas = [*(level.sigma for level in edm(steps - 1, problem.noisiest, DDRM_LAST)), 0.0]
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return DDRM(own, sigmas, eta=eta)(y, physics).detach()


_SAMPLERS: dict[str, Callable[[Problem, Any, float, dict[str, Any]], Any]] = {
    "MMPS": _mmps,
    "PiGDM": _pigdm,
    "DPS": _dps,
    PIR: _azula_diffpir,
}


def tuned(
    name: str, score: Callable[[float], tuple[Tensor, Tensor]], tried: Sequence[float] = ()
) -> dict[str, Any]:
    """The setting whose draws have the least CRPS, of `tried` or `TRIED`.

    CRPS is least for the right law, where an error of single draws is least for draws without
    spread. `score` gives draws and truth; `at_edge`: one beyond those tried might be better.
    """

    def badness(setting: float) -> float:
        draws, truth = score(setting)
        return crps(draws, truth).mean().item() if draws.isfinite().all() else math.inf

    tried = tried or TRIED[name]
    setting = min(tried, key=badness)
    at_edge = setting in (tried[0], tried[-1]) and setting not in BOUNDS.get(name, ())
    return {"setting": setting, "at_edge": at_edge}


def restore(
    name: str,
    model: Model,
    y: Tensor,
    operator: Any,
    noise: float,
    steps: int | None = None,
    draws: int = 1,
    seed: int = 0,
    *,
    setting: float | None = None,
    batch_size: int | None = None,
    precision: str = "float32",
) -> tuple[Tensor, float]:
    """Draws (draws, B, ...) in [0, 1] units by a rival, and the evaluations of one draw.

    y (B, *out_shape) are measurements of images in [0, 1]. Without `steps` and `setting`, the one
    number of the method, they are its library's own. Draws depend on the batch size.
    """
    if name not in DEFAULTS:
        raise unknown_name("rival", name, DEFAULTS)
    steps = STEPS[name] if steps is None else steps
    check_model(model)
    RestorationSettings(noise, steps=steps, draws=draws, seed=seed)  # refuses what cannot be
    operator = as_operator(operator, model.shape, torch.empty(0, device=model.device))
    y = measured(y.detach(), operator).to(model.device, torch.float32)
    noise_variances(float(noise), operator, y)
    setting = DEFAULTS[name] if setting is None else setting
    # The denoiser alone: a model would refuse what is not finite.
    rows, denoiser = y.repeat_interleave(draws, 0), model.require_denoiser()
    solver = _by_azula if name in AZULA else _by_deepinv

    def work(start: int, stop: int) -> tuple[Tensor, Cost]:
        counted = Counted(denoiser, precision=precision)
        own = child_seed(seed, f"{name} from {start}")
        known = (operator, float(noise), steps, setting, own)
        return solver(name, model, counted, rows[start:stop], *known).cpu(), counted.cost

    size = batch_size or max(1, chains_at_once(model) // GRAPH)
    batches = Batches(size, "draws", "use fewer at a time: batch_size=1")
    parts = list(batches.over(len(rows), work))
    images = torch.cat([part for part, _ in parts]).unflatten(0, (len(y), draws))
    return images.transpose(0, 1), parts[0][1].evaluations


def _by_azula(
    name: str, model: Model, counted: Counted, y: Tensor, operator: Operator, noise: float,
    steps: int, setting: float, seed: int,
) -> Tensor:  # fmt: skip
    """Draws in [0, 1] units: azula has data in [-1, 1], so that A u = 2 A x - A 1."""
    low, high = model.interval
    centre, scale = (low + high) / 2, (high - low) / 2
    noisiest = max(level.ratio for level in model.levels) / scale
    ones = operator(y.new_ones(1, *model.shape))
    own = operator.known(2 * y - ones)
    problem = Problem(counted, own, operator, 2 * noise, noisiest, centre, scale)
    return (problem.draw(name, steps, setting, seed) + 1) / 2


def _by_deepinv(
    name: str, model: Model, counted: Counted, y: Tensor, operator: Operator, noise: float,
    steps: int, setting: float, seed: int,
) -> Tensor:  # fmt: skip
    """Draws in [0, 1] units by deepinv."""
    load_deepinv()
    from mmdgs.interop.deepinv import GuestDenoiser, to_physics

    low, high = model.interval
    noisiest = max(level.ratio for level in model.levels) / (high - low)
    guest = GuestDenoiser(counted, model.interval)
    solver = _SOLVERS[name](guest, noise, steps, setting, noisiest, y.device)
    physics = to_physics(operator, noise).to(y.device)
    start = {"x_init": (len(y), *operator.shape)} if name == MATCHING else {}
    with torch.random.fork_rng([y.device] if y.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return solver(y, physics, **start).detach().to(y)


def _matching(
    guest: Any, noise: float, steps: int, setting: float, noisiest: float, on: Any
) -> Any:
    from deepinv import sampling

    times = torch.linspace(1.0, 0.001, steps, dtype=torch.float64, device=on)
    fidelity = sampling.MomentMatchingDataFidelity(cg_max_iter=int(setting))
    sde = sampling.VarianceExplodingDiffusion(alpha=0.25, device=on)
    solver = sampling.EulerSolver(times)
    return sampling.PosteriorDiffusion(fidelity, guest, sde, solver, device=on)


def _diffpir(guest: Any, noise: float, steps: int, setting: float, noisiest: float, on: Any) -> Any:
    """Its levels begin at 78 for x in [0, 1]; by a smaller last beta at the network's noisiest."""
    from deepinv.optim import L2
    from deepinv.sampling import DiffPIR

    solver = DiffPIR(guest, L2(), noise, steps, lambda_=setting, device=on)
    total = math.log1p((2 * noisiest) ** 2)  # the sum of the betas, about
    last = min(solver.beta_end, 2 * total / solver.num_train_timesteps - solver.beta_start)
    solver.beta_end, solver.get_alpha_prod = last, partial(solver.get_alpha_prod, beta_end=last)
    names = "sqrt_1m_alphas_cumprod reduced_alpha_cumprod sqrt_alphas_cumprod"  # what it returns
    for attribute, values in zip(names.split(), solver.get_alpha_beta(), strict=False):
        setattr(solver, attribute, values)
    return solver


def _dpir(guest: Any, noise: float, steps: int, setting: float, noisiest: float, on: Any) -> Any:
    from deepinv.optim import DPIR

    return DPIR(setting * noise, guest, on)


_SOLVERS: dict[str, Callable[..., Any]] = {MATCHING: _matching, "DiffPIR": _diffpir, "DPIR": _dpir}
