"""What p(x | noisy x) says about an image: mean, uncertainty, draws and principal components.

All values are in [0, 1] units, whatever interval the model has. What is computed: estimators.py;
images of other sizes than the network's: tiles.py.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost, counting
from mmdgs.data.single import NamedImage
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.jacobians import blind_sigma
from mmdgs.linalg.components import checked_region, inside
from mmdgs.metrics import psnr
from mmdgs.models import Model
from mmdgs.models.model import as_model
from mmdgs.moments import Moments
from mmdgs.moments.contract import estimator_and_denoiser
from mmdgs.noise import NoiseLevel
from mmdgs.operators import ESTIMATE, Mask
from mmdgs.randomness import Streams, child_seed, randn_like
from mmdgs.restoration.checks import noise_of
from mmdgs.restoration.folder import simulated
from mmdgs.sensors import Sensor
from mmdgs.uncertainty.estimators import (
    MEAN,
    Estimators,
    computed,
    level_of,
    own_sigmas,
    settings_for,
)
from mmdgs.uncertainty.regions import most_seen
from mmdgs.uncertainty.settings import PosteriorSettings, Region
from mmdgs.uncertainty.tiles import require_room

if TYPE_CHECKING:
    from mmdgs.uncertainty.conformal import Conformal

COVERED = 0.9
CLIPPED = 0.01
WERE_CLIPPED = (
    "lie at 0 or full scale, where noise was clipped. With one sigma they count as measured; mmdgs "
    "restore --operator none takes them as bounds."
)
ARRAYS = (
    "noisy", "mean", "std", "low", "high", "draws", "directions", "variances", "residuals",
    "skewness", "excess_kurtosis", "grid", "density", "reach",
)  # fmt: skip


@dataclass(frozen=True)
class ImagePosterior:
    """The posterior of one image (C, H, W), in [0, 1] units and not clipped; arrays on the CPU.

    `low` and `high` are the ends of 90% intervals; k components have unit `directions` (k, C, H,
    W), and `reach` (k,) is how far their 90% intervals reach on either side. `density` (k, n) over
    `grid` (n,), in standard deviations, is the marginal along each.
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
    command: str = ""
    """`mmdgs posterior` with the options that make it, but for the number of draws, components
    and the region."""
    region_given: bool = True

    @property
    def stds(self) -> Tensor:
        """Standard deviations along the components, (k,)."""
        return self.variances.clamp(min=0).sqrt()

    def walk(
        self, steps: tuple[float, ...] = (-2, -1, 0, 1, 2), region: Region | None = None
    ) -> Tensor:
        """mean + step * std * direction for each component and step, (k, steps, C, H, W); of a
        region of it, if given.
        """
        mean, directions = self.mean, self.directions
        if region is not None:
            mean, directions = inside(mean, region), inside(directions, region)
        moves = torch.tensor(steps)[None] * self.stds[:, None]
        return mean + moves[..., None, None, None] * directions[:, None]

    def arrays(self) -> dict[str, Any]:
        """All arrays by name, as `arrays.npz` has them."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        arrays |= {"sigma": torch.tensor(self.sigma)}
        arrays |= {} if self.truth is None else {"truth": self.truth}
        return {name: value.float().numpy() for name, value in arrays.items()}

    def save_page(self, path: Path | str) -> Path:
        """Write the page that `mmdgs posterior` writes: one HTML file, with all pictures inside."""
        from mmdgs.uncertainty.page import page  # which imports this module

        write_atomically(Path(path), page(self).encode())
        return Path(path)


@dataclass(frozen=True)
class PosteriorWork:
    """The images of a run, checked before anything is written, and what is done with each.

    `given` is an estimator in place of the model's, `held_out` are clean images (n, C, H, W) of the
    model's size for conformal intervals (conformal.py), which need one sigma for all. `noises` are
    those of the images, where they are not the settings' sigma. What has another noise at every
    pixel, or pixels that are not known (NaN), goes by draws (drawn.py); then values at the ends of
    their file count as `bounds`, if so.
    """

    model: Model
    images: Sequence[NamedImage]
    settings: PosteriorSettings
    given: Moments | None = None
    held_out: Tensor | None = None
    noises: Sequence[Any] = ()
    bounds: bool = False

    def __post_init__(self) -> None:
        shape = self.model.shape
        if len(shape) != 3:
            raise UsageError(f"posteriors are of images, and this model's data have shape {shape}")
        self.model.require_denoiser()
        settings = settings_for(self.model, self.settings)
        if self.images and all(self.varies(i) for i in range(len(self.images))):
            settings = replace(settings, components=0)
        object.__setattr__(self, "settings", settings)
        if not self.images:
            raise UsageError("there are no images")
        if not isinstance(settings.sigma, int | float) and self.held_out is not None:
            raise UsageError("a calibration needs sigma as a number")
        for named in self.images:
            try:
                self._check(named)
            except UsageError as error:
                raise UsageError(f"{named.name}: {error}") from error
        _ = self.levels

    def _check(self, named: NamedImage) -> None:
        """Refuse an image that the model does not take, or memory does not hold."""
        settings = self.settings
        image, _ = named.in_channels(self.model.shape[0], clean=settings.simulate)
        height, width = image.shape[1:]
        region = checked_region(settings.region, image.shape)
        numbers = len(image) * (region[2] * region[3] if region else height * width)
        if (settings.components or 0) > numbers:
            raise UsageError(
                f"{settings.components} components are asked for, and there are {numbers} numbers: "
                f"take at most {numbers}, or none"
            )
        seen = most_seen(region, height, width, settings.margin)
        require_room(self.model, image.shape, seen, settings)

    @cached_property
    def sigmas(self) -> list[float]:
        """The noise of each image, for values in [0, 1], by its mean square; an estimate is at
        least that of the model's last level, where it has many.
        """
        words = [isinstance(self.noise(i), str) for i in range(len(self.images))]
        each = zip(self._estimated, words, strict=True)
        return [max(sigma, self._least) if word else sigma for sigma, word in each]

    def noise(self, i: int) -> Any:
        """That of image i: a number, a word, a tensor or a sensor."""
        return self.noises[i] if self.noises else self.settings.sigma

    def varies(self, i: int) -> bool:
        """Whether the noise of image i is not the same number at all pixels."""
        noise, image = self.noise(i), self.images[i].image
        one = noise == ESTIMATE if isinstance(noise, str) else isinstance(noise, int | float)
        return not one or bool(image.isnan().any())

    @property
    def _least(self) -> float:
        own = own_sigmas(self.model)
        return own[0] if len(own) > 1 else 0.0

    @cached_property
    def _estimated(self) -> list[float]:
        estimates = []
        for i, named in enumerate(self.images):
            x, noise = named.image[None], self.noise(i)
            try:
                if isinstance(noise, int | float):
                    estimates.append(float(noise))
                    continue
                known = Mask(~x[0].isnan())
                level = noise_of(noise, known.known(x), known)
                level = level.variances(x).sqrt() if isinstance(level, Sensor) else level
                estimates.append(level.square().nanmean().sqrt().item())
            except UsageError as error:
                raise UsageError(f"{named.name}: {error}") from error
        return estimates

    @cached_property
    def levels(self) -> list[NoiseLevel]:
        """The level of each image's noise, which the model knows."""
        levels = []
        width = self.model.interval[1] - self.model.interval[0]
        for i, (named, sigma) in enumerate(zip(self.images, self.sigmas, strict=True)):
            try:
                level = NoiseLevel(sigma=sigma * width)
                levels.append(level if self.varies(i) else level_of(self.model, sigma))
            except ValueError as error:
                if self.noise(i) != ESTIMATE:
                    raise
                estimate = f"the noise of {named.name} was estimated: {error}"
                raise UsageError(f"{estimate}; give sigma as a number") from error
        return levels

    def posterior(
        self,
        i: int,
        conformal: Conformal | None = None,
        tick: Callable[[int], Any] = lambda count: None,
        doing: Callable[[str], Any] = lambda words: None,
    ) -> ImagePosterior:
        """That of image i; what is random in it depends on (seed, i) alone.

        `tick` is called after each of `settings.parts` parts, `doing` with what begins.
        """
        model, settings, started = self.model, self.settings, time.perf_counter()
        noisy, truth, remarks = self._noisy(i)
        if self.varies(i):
            from mmdgs.uncertainty.drawn import drawn_posterior  # which imports this module

            return drawn_posterior(self, i, noisy, truth, remarks, tick, doing)
        estimators = Estimators.of(model, noisy.shape, settings, self.given)
        x_t = model.scaled(noisy[None].float()).to(model.device)

        def streams(purpose: str) -> Streams:
            return Streams([child_seed(settings.seed, f"posterior {i} {purpose}")], 1)

        doing(MEAN)
        with counting() as cost:
            estimates = estimators.at(x_t, self.levels[i], streams)
            region, arrays = computed(estimates, settings, tick, doing)
        low, width = model.interval[0], model.interval[1] - model.interval[0]
        arrays |= {key: (arrays[key] - low) / width for key in ("mean", "draws")}
        arrays |= {"std": arrays["std"] / width, "variances": arrays["variances"] / width**2}
        mean, std = arrays["mean"], arrays["std"]
        pixel = component = estimates.q.deviations(COVERED)
        if conformal is not None:
            pixel, component = conformal.pixel, conformal.component
            remarks = (*remarks, conformal.words)
        denoiser = estimators.denoiser
        posterior = ImagePosterior(
            name=self.images[i].name,
            sigma=float(self.sigmas[i]),
            noisy=noisy.cpu().float(),
            low=mean - pixel * std,
            high=mean + pixel * std,
            reach=component * arrays["variances"].clamp(min=0).sqrt(),
            truth=None if truth is None else truth.cpu().float(),
            region=region,
            tiles=getattr(denoiser, "tiles", 1),
            cost=cost,
            seconds=time.perf_counter() - started,
            remarks=remarks,
            model=model.source,
            command=self.command(i),
            region_given=settings.region == region,
            **arrays,  # type: ignore[arg-type]
        )
        return replace(posterior, scores=scores_of(posterior))

    def _noisy(self, i: int) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
        """Image i in the model's channels with its noise, the truth if simulated, and remarks."""
        settings, sigma = self.settings, self.sigmas[i]
        image, remarks = self.images[i].in_channels(self.model.shape[0], clean=settings.simulate)
        if settings.simulate:
            seed = child_seed(settings.seed, f"simulate {i}")
            if self.varies(i):
                known = Mask(torch.ones_like(image))
                return simulated(image[None], known, self.noise(i), seed=seed)[0], image, remarks
            streams = Streams([seed], 1)
            return image + sigma * randn_like(image[None], streams)[0], image, remarks
        scale = self.images[i].scale
        bounds = None if scale is None else scale.bounds
        if bounds and not settings.simulate and not self.varies(i):
            share = ((image <= bounds[0]) | (image >= bounds[1])).float().mean().item()
            if share > CLIPPED:
                remarks = (*remarks, f"{100 * share:.2g}% of the values {WERE_CLIPPED}")
        if self.noise(i) == ESTIMATE:
            least, said = self._least, f"The noise was estimated from the image: {sigma:.3g}."
            if self._estimated[i] < least:
                said = f"{said[:-1]}, the least that the model knows: it is cleaner than that."
            remarks = (*remarks, said)
        return image, None, remarks

    def command(self, i: int) -> str:
        """`mmdgs posterior` with the options that make the posterior of image i."""
        settings, words = self.settings, ["mmdgs", "posterior"]
        words += [self.model.source or "MODEL", self.images[i].source or "IMAGE"]
        sigma = "MAP" if self.varies(i) else f"{self.sigmas[i]:.6g}"
        words += ["--sigma", sigma, *["--simulate"] * settings.simulate]
        words += ["--seed", str(settings.seed)] if settings.seed else []
        return shlex.join(words)


def image_posterior(
    model: Model | Denoiser | Moments,
    noisy: Float[Tensor, "c h w"],
    settings: PosteriorSettings | float | str | Tensor | Sensor = ESTIMATE,
    *,
    levels: Sequence[NoiseLevel] | None = None,
    shape: Sequence[int] | None = None,
    interval: tuple[float, float] | None = None,
) -> ImagePosterior:
    """The posterior of one noisy image with values in [0, 1] (before the noise), of any size.

    `settings` are `PosteriorSettings`, or a sigma alone (a number, a map, a sensor); without them
    it is estimated, by a blind denoiser (`mmdgs.blind_denoiser`) from its own residual. A grey
    image goes through a model of colours by `Model.grey`. `model` may
    also be a denoiser, such as `mmdgs.noise_denoiser(net)`. Its `levels` are those it was trained
    at (without them any sigma is asked of it as it is), `shape` (C, H, W) is that of its images
    (unless given, that of this one; larger images go through it in tiles; (3, None, None): any
    size) and `interval` that of its values, [0, 1] unless given. Or `model` may be an estimator of
    a model or of a denoiser, calibrated (`mmdgs.calibrate`) or not: mean, standard deviations and
    intervals are then its own, and so are draws and components where its covariance has
    correlations.
    """
    if not isinstance(settings, PosteriorSettings):
        settings = PosteriorSettings(settings)
    given, source = estimator_and_denoiser(model)
    if settings.sigma == ESTIMATE and getattr(source, "blind", False):
        low, high = interval or (0.0, 1.0)
        streams = Streams([child_seed(settings.seed, "blind sigma")], 1)
        x = low + (high - low) * noisy[None].float()
        sigma = blind_sigma(source, x, generator=streams).item() / (high - low)
        settings = replace(settings, sigma=sigma)
    if levels is not None and isinstance(source, Model):
        raise UsageError(f"levels are for a denoiser that is no Model: {source!r} has its own")
    own_shape = shape if shape is not None or isinstance(source, Model) else tuple(noisy.shape)
    network = as_model(source, levels=levels, shape=own_shape, interval=interval)
    if noisy.ndim == 3 and len(noisy) == 1 and given is None:
        network = network.grey()
    if noisy.ndim != 3 or noisy.shape[0] != network.shape[0]:
        raise UsageError(
            f"the model takes images ({network.shape[0]}, height, width), got {tuple(noisy.shape)}"
        )
    return PosteriorWork(network, [NamedImage("image", noisy)], settings, given).posterior(0)


def scores_of(posterior: ImagePosterior) -> dict[str, float]:
    """How near the truth is, where it is known.

    PSNR of the noisy image and of the mean in dB; the mean square of z = (x - mean) / std (right:
    1); the share of pixels in their 90% intervals, and of components; the share of the squared
    error that the components explain.
    """
    truth = posterior.truth
    if truth is None:
        return {}
    error = truth - posterior.mean
    inside = (truth >= posterior.low) & (truth <= posterior.high)
    scores = {
        "psnr_noisy": psnr(posterior.noisy[None], truth[None]).item(),
        "psnr_mean": psnr(posterior.mean[None], truth[None]).item(),
        "z_variance": (error / posterior.std).square().mean().item(),
        "coverage_90": inside.float().mean().item(),
    }
    if len(posterior.directions):
        along = posterior.directions.flatten(1) @ error.flatten()
        scores["component_coverage_90"] = (along.abs() <= posterior.reach).float().mean().item()
        if posterior.region is None:
            scores["explained"] = (along.square().sum() / error.square().sum()).item()
    return scores
