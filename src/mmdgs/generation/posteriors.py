"""What p(x | noisy x) says about an image: mean, uncertainty, draws, principal components and their marginals.

    mean, std, intervals   the diagonal covariance by 10 probes, with the calibration that is kept with the model
    draws                  the full covariance by Krylov spaces, never formed
    components             its largest eigenvalues by block Lanczos, with skewness and excess kurtosis along each

All values are in [0, 1] units, whatever interval the model has. Images of other sizes than the network's: tiles.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost, counting
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.generation.tiles import TiledDenoiser, fitted_denoiser
from mmdgs.linalg.components import Components, checked_region
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import psnr
from mmdgs.models import Model
from mmdgs.models.model import as_model
from mmdgs.moments import Moments, higher_moments
from mmdgs.moments.calibrated import calibration_record
from mmdgs.moments.contract import estimator_and_denoiser, with_denoiser
from mmdgs.noise import NoiseLevel
from mmdgs.operators.measurements import check_unit_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams, checked_seed, child_seed

PROBES, KRYLOV_STEPS = 10, 20
COVERED = 0.9
Region = tuple[int, int, int, int]


@dataclass(frozen=True)
class PosteriorSettings:
    """What is wanted of each image: how many components and draws, of which region, and how near."""

    components: int = 5
    draws: int = 8
    region: Region | None = None
    tolerance: float = 0.01
    krylov_steps: int = KRYLOV_STEPS
    seed: int = 0
    calibrated: bool | None = None  # True: require the calibration that is kept with the model; False: leave it out

    def __post_init__(self) -> None:
        for name, least in (("components", 0), ("draws", 0), ("krylov_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
        checked_seed(self.seed)


@dataclass(frozen=True)
class Factors:
    """How many standard deviations 90% intervals reach, pixel by pixel and along components (conformal.py)."""

    pixel: float
    component: float


@dataclass(frozen=True)
class ImagePosterior:
    """The posterior of one image (C, H, W), in [0, 1] units and not clipped; arrays on the CPU.

    `low` and `high` are the ends of 90% intervals; k components have unit `directions` (k, C, H, W), and `reach`
    (k,) is how far their 90% intervals reach on either side. `density` (k, n) over `grid` (n,), in standard deviations,
    is the marginal along each.
    """

    name: str
    sigma: float
    noisy: Tensor
    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor
    draws: Tensor
    directions: Tensor
    variances: Tensor
    residuals: Tensor
    skewness: Tensor
    excess_kurtosis: Tensor
    grid: Tensor
    density: Tensor
    reach: Tensor
    truth: Tensor | None
    region: Region | None
    tiles: int
    cost: Cost
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    model: str = ""

    @property
    def stds(self) -> Tensor:
        """Standard deviations along the components, (k,)."""
        return self.variances.clamp(min=0).sqrt()

    def walk(self, steps: tuple[float, ...] = (-2, -1, 0, 1, 2)) -> Tensor:
        """mean + step * std * direction for each component and step, (k, steps, C, H, W)."""
        moves = torch.tensor(steps)[None] * self.stds[:, None]
        return self.mean + moves[..., None, None, None] * self.directions[:, None]

    def arrays(self) -> dict[str, Any]:
        """All arrays by name, as `arrays.npz` has them."""
        names = ["noisy", "mean", "std", "low", "high", "draws", "directions", "variances", "residuals", "skewness"]
        names += ["excess_kurtosis", "grid", "density", "reach"]
        found = {name: getattr(self, name) for name in names} | {"sigma": torch.tensor(self.sigma)}
        if self.truth is not None:
            found["truth"] = self.truth
        return {name: value.float().numpy() for name, value in found.items()}

    def save_page(self, path: Path | str) -> Path:
        """Write the page that `mmdgs posterior` writes: one HTML file, with all pictures inside."""
        from mmdgs.generation.posterior_page import page  # which imports this module

        write_atomically(Path(path), page(self).encode())
        return Path(path)


def level_of(model: Model, sigma: float) -> NoiseLevel:
    """The level of noise with this standard deviation for values in [0, 1]; refused beyond the model's range."""
    if not (isinstance(sigma, int | float) and math.isfinite(sigma) and sigma > 0):
        raise UsageError(f"sigma must be a positive number, got {sigma!r}")
    check_unit_noise(sigma)
    width = model.interval[1] - model.interval[0]
    own = sorted(level.ratio / width for level in model.levels)
    if own and not 0.99 * own[0] <= sigma <= 1.01 * own[-1]:
        knows = f"sigma {own[0]:.3g} alone" if len(own) == 1 else f"sigma from {own[0]:.3g} to {own[-1]:.3g}"
        raise UsageError(f"the model knows {knows}, for values in [0, 1], and sigma is {sigma:.3g}")
    return NoiseLevel(sigma=sigma * width)


@dataclass(frozen=True)
class Estimators:
    """The two posteriors of images of one size: the calibrated diagonal, and the full covariance by products.

    An estimator that was given is the first, and the second too where it has correlations.
    """

    denoiser: Denoiser
    diagonal: Moments
    full: Moments
    given: bool = False

    @classmethod
    def of(
        cls,
        model: Model,
        shape: Sequence[int],
        krylov_steps: int = KRYLOV_STEPS,
        calibrated: bool | None = None,
        given: Moments | None = None,
    ) -> Estimators:
        """Those of a model for images of a shape (C, H, W); where `calibrated` is True, the diagonal must be."""
        denoiser = fitted_denoiser(model, *shape[-2:])
        diagonal = given or model.posterior("diagonal", probes=PROBES, calibrated=calibrated)
        full = model.posterior("krylov", krylov_steps=krylov_steps, calibrated=None if calibrated else calibrated)
        return cls(denoiser, with_denoiser(diagonal, denoiser), with_denoiser(full, denoiser), given is not None)

    def calibrations(self, levels: Sequence[NoiseLevel]) -> dict[str, Any]:
        """For records: which calibration each of the two has, and at how many of the levels it was not fitted."""
        both = {"diagonal": self.diagonal, "krylov": self.full}
        return {name: calibration_record(moments, levels) for name, moments in both.items()}


def image_posterior(
    model: Model | Denoiser | Moments,
    noisy: Float[Tensor, "c h w"],
    sigma: float,
    asked: PosteriorSettings | None = None,
    *,
    levels: Sequence[NoiseLevel] | None = None,
    shape: Sequence[int] | None = None,
    interval: tuple[float, float] | None = None,
    truth: Float[Tensor, "c h w"] | None = None,
    factors: Factors | None = None,
    number: int = 0,
    name: str = "image",
    remarks: tuple[str, ...] = (),
    tick: Callable[[int], Any] = lambda count: None,
) -> ImagePosterior:
    """The posterior of one noisy image with values in [0, 1] (before the noise), of any size.

    `model` may also be a denoiser, such as `mmdgs.noise_denoiser(net)`. Its `levels` are those it was trained at
    (without them any sigma is asked of it as it is), `shape` (C, H, W) is that of its images (unless given, that of
    this one; larger images go through it in tiles) and `interval` that of its values, [0, 1] unless given. Or `model`
    may be an estimator of a model or of a denoiser, calibrated (`mmdgs.calibrate`) or not: mean, standard deviations
    and intervals are then its own, and so are draws and components where its covariance has correlations.

    What is random in it depends on (seed, number) alone. `tick` is called after each of `parts_of(asked)` parts.
    """
    asked = asked or PosteriorSettings()
    given, source = estimator_and_denoiser(model)
    if levels is not None and isinstance(source, Model):
        raise UsageError(f"levels are for a denoiser that is no Model: {source!r} has its own")
    own_shape = shape if shape is not None or isinstance(source, Model) else tuple(noisy.shape)
    model = as_model(source, levels=levels, shape=own_shape, interval=interval)
    if noisy.ndim != 3 or noisy.shape[0] != model.shape[0]:
        raise UsageError(f"the model takes images ({model.shape[0]}, height, width), got {tuple(noisy.shape)}")
    level = level_of(model, sigma)
    checked_region(asked.region, noisy.shape)
    started = time.perf_counter()
    made = Estimators.of(model, noisy.shape, asked.krylov_steps, asked.calibrated, given)
    with counting() as cost:
        q, arrays = _computed(made, model.scaled(noisy[None].float()).to(model.device), level, asked, number, tick)
    low, width = model.interval[0], model.interval[1] - model.interval[0]
    mean, draws = ((arrays[name] - low) / width for name in ("mean", "draws"))
    std, variances = arrays["std"] / width, arrays["variances"] / width**2
    reached = factors or Factors(*[q.deviations(COVERED)] * 2)
    seen = ImagePosterior(
        name=name,
        sigma=float(sigma),
        noisy=noisy.cpu().float(),
        low=mean - reached.pixel * std,
        high=mean + reached.pixel * std,
        reach=reached.component * variances.clamp(min=0).sqrt(),
        truth=None if truth is None else truth.cpu().float(),
        region=asked.region,
        tiles=made.denoiser.tiles if isinstance(made.denoiser, TiledDenoiser) else 1,
        cost=cost,
        seconds=time.perf_counter() - started,
        remarks=remarks,
        model=model.source,
        **{**arrays, "mean": mean, "draws": draws, "std": std, "variances": variances},  # type: ignore[arg-type]
    )
    return replace(seen, scores=scores_of(seen))


def _computed(
    made: Estimators,
    x_t: Tensor,
    level: NoiseLevel,
    asked: PosteriorSettings,
    number: int,
    tick: Callable[[int], Any],
) -> tuple[Gaussian, dict[str, Tensor]]:
    """The diagonal posterior of x_t (1, C, H, W), and arrays as `ImagePosterior` names them, in the model's units."""
    q = made.diagonal(x_t, level, generator=_streams(asked.seed, number, "probes"))
    found = {"mean": q.mean, "std": q.cov.diagonal().sqrt()}
    tick(1)
    whole = made.given and not isinstance(q.cov, Diagonal)
    full = q if whole else made.full(x_t, level, generator=_streams(asked.seed, number, "signs"))
    draws = [_draw(full, asked.seed, number, j, tick) for j in range(asked.draws)]
    found["draws"] = torch.stack(draws, 1) if draws else x_t.new_zeros(1, 0, *x_t.shape[1:])
    own = _components(full, asked)
    found |= {"directions": own.directions, "variances": own.variances, "residuals": own.residuals}
    tick(1)
    names = ("skewness", "excess_kurtosis", "density")
    found |= dict.fromkeys(names, x_t.new_zeros(1, 0))
    grid = torch.zeros(0)
    if asked.components:
        higher = higher_moments(made.denoiser, x_t, level, own.directions)
        marginal = higher.marginal()
        found |= dict(zip(names, (higher.skewness, higher.excess_kurtosis, marginal.density), strict=True))
        grid = marginal.grid
    tick(1)
    return q, {name: value.detach().cpu()[0] for name, value in found.items()} | {"grid": grid}


def parts_of(asked: PosteriorSettings) -> int:
    """How many parts the work on one image has, for a progress bar."""
    return asked.draws + 3


def _streams(seed: int, number: int, purpose: str) -> Streams:
    return Streams([child_seed(seed, f"posterior {number} {purpose}")], 1)


def _draw(q: Gaussian, seed: int, number: int, j: int, tick: Callable[[int], Any]) -> Tensor:
    found = q.sample(generator=_streams(seed, number, f"draw {j}"))
    tick(1)
    return found


def _components(q: Gaussian, asked: PosteriorSettings) -> Components:
    if asked.components == 0:
        none = q.mean.new_zeros(1, 0)
        return Components(none, q.mean.new_zeros(1, 0, *q.mean.shape[1:]), none)
    return q.components(asked.components, asked.region, tolerance=asked.tolerance)


def scores_of(seen: ImagePosterior) -> dict[str, float]:
    """How near the truth is, where it is known.

    PSNR of the noisy image and of the mean in dB; the mean square of z = (x - mean) / std (right: 1); the share of
    pixels in their 90% intervals, and of components; the share of the squared error that the components explain.
    """
    if seen.truth is None:
        return {}
    error = seen.truth - seen.mean
    found = {
        "psnr_noisy": psnr(seen.noisy[None], seen.truth[None]).item(),
        "psnr_mean": psnr(seen.mean[None], seen.truth[None]).item(),
        "z_variance": (error / seen.std).square().mean().item(),
        "coverage_90": ((seen.truth >= seen.low) & (seen.truth <= seen.high)).float().mean().item(),
    }
    if len(seen.directions):
        along = seen.directions.flatten(1) @ error.flatten()
        found["component_coverage_90"] = (along.abs() <= seen.reach).float().mean().item()
        if seen.region is None:
            found["explained"] = (along.square().sum() / error.square().sum()).item()
    return found
