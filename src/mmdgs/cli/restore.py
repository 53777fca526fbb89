"""`mmdgs restore`: images from incomplete, blurred or noisy measurements, as draws of p(x | y)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, FirstN, Overwrite, Quiet, Resume, app
from mmdgs.cli.arguments import ModelOption, Words, model_and_images
from mmdgs.cli.options import options_of
from mmdgs.covariances import COVARIANCES, OPTIONS, named, with_options
from mmdgs.errors import UsageError
from mmdgs.options import option_names
from mmdgs.restoration.settings import GOOD, RestorationSettings, quality_named

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.data import ImageSet
    from mmdgs.data.instruments import Range
    from mmdgs.data.single import NamedImage
    from mmdgs.models import Model
    from mmdgs.operators import Operator
    from mmdgs.restoration.folder import Measurements, RestorationSummary

WORDS = {
    "psnr_draw": "PSNR of a draw (dB)",
    "psnr_mean": "PSNR of the mean (dB)",
    "ssim_draw": "SSIM of a draw",
    "ssim_mean": "SSIM of the mean",
    "calibration": "spread over error (right: 1)",
    "coverage_90": "coverage of 90% intervals",
    "crps": "CRPS",
}
TAKEN = {"products", "symmetric", "calibrated", *option_names(RestorationSettings)}
SHOWN_LEVELS = 8
"""Images of which each one's estimated noise and evidence are printed."""


@app.command()
@options_of(RestorationSettings, *COVARIANCES.values(), only=TAKEN)
def restore(
    context: Context,
    images: Words,
    operator: str = Option(
        help="none, sr:4, box:16, random:0.8, blur:1.5, motion:9, gray, mask.png (white: measured)."
    ),
    noise: str = Option(help=cli.NOISE_HELP),
    out: Path = Option(
        ..., "--out", "-o", help="Folder for draws, means, uncertainties and a picture."
    ),
    *,
    model: ModelOption = None,
    quality: str = Option(
        GOOD,
        help="Covariance and steps in a word: fast (10 evaluations a draw), good (25, the better "
        "error bars) or best (48, the lowest error).",
    ),
    simulate: bool = Option(
        False, "--simulate", help="The images are clean: degrade them first, and score the results."
    ),
    value_range: cli.Scaled = None,
    keep_clipped: cli.KeepClipped = False,
    n: FirstN = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **values: Any,
) -> None:
    """Draw images that explain measurements y = A x + noise; stopped, it goes on with --resume.

    Without a model it is photo, which takes images of any size.
    """
    from mmdgs.data.instruments import parse_range
    from mmdgs.data.single import noises_of
    from mmdgs.models import load
    from mmdgs.restoration.checks import check_model
    from mmdgs.restoration.folder import RestoredFolder, restore_into

    name, sources = model_and_images(images, model)
    cli.refuse_idle(
        context,
        (cli.no_sets(*sources), ("data_dir",), "sets such as cifar10:test"),
        (simulate, ("keep_clipped",), "measurements, and not --simulate"),
    )
    RestoredFolder(out).check(resume=resume, overwrite=overwrite)
    level = cli.noise_named("--noise", noise)
    if simulate and isinstance(level, str):
        raise UsageError(f"--simulate adds noise: give --noise as a number, not {level}")
    given = parse_range(value_range)
    network = load(name, device=cli.device_named(device))
    if len(network.shape) != 3:
        raise UsageError(f"restoration is of images, and this model's data are {network.shape}")
    check_model(network)
    if simulate:
        cli.warn_of_training_images(network, *sources)
    pictures = _pictures(sources, data_dir, network, simulate=simulate, limit=n, given=given)
    noises = noises_of(level, pictures)
    settings = _settings(noises[0], quality, values)
    if operator != "gray" and all(len(picture.image) == 1 for picture in pictures):
        network = network.grey()
    keep = keep_clipped or simulate
    measurements = _measurements(
        pictures, network, operator, settings, noises, simulate=simulate, keep=keep
    )
    tell_clipped(measurements)
    if not quiet:
        cli.tell(
            f"{cli.count_of(len(pictures), 'image')}, {settings.draws} draws each along "
            f"{settings.steps} noise levels, {settings.covariance} covariance, by the model "
            f"{escape(name)}"
        )
    with cli.resumable():
        summary = restore_into(
            out, network, measurements, settings, resume=resume, overwrite=overwrite
        )
    _tell(summary, settings)


def _settings(noise: Any, quality: str, values: dict[str, Any]) -> RestorationSettings:
    """Those of a quality, but for the options that were given."""
    covariance, steps = quality_named(quality)
    options = {name: values.pop(name) for name in OPTIONS & values.keys()}
    name = values.pop("covariance", None)
    covariance = named(name, options) if name else with_options(covariance, options)
    return RestorationSettings(noise, covariance, **{"steps": steps, **values})


def _pictures(
    sources: list[str],
    data_dir: Path | None,
    model: Model,
    *,
    simulate: bool,
    limit: int | None,
    given: Range | None,
) -> list[NamedImage]:
    """Images in [0, 1] units, at full depth; clean ones of sets and folders are brought to the
    model's size, where it has one.
    """
    from mmdgs.data import midpoints
    from mmdgs.data.single import NamedImage, is_single, named_images

    if not simulate or model.any_size:
        return named_images(sources, data_dir=data_dir, limit=limit, given=given)
    pictures: list[NamedImage] = []
    for source in sources:
        if is_single(source):
            pictures += named_images([source], data_dir=data_dir, given=given)
            continue
        if given is not None:
            raise UsageError(f"--range is for single files, and {source} is a set: leave it out")
        stored = images_of_shape(source, data_dir, model.shape, resize=True).take(slice(limit))
        names = stored.names or [f"{i:06d}" for i in range(len(stored))]
        images = zip(names, midpoints(stored.images), strict=True)
        pictures += [NamedImage(str(Path(name).with_suffix("")), image) for name, image in images]
    return pictures[:limit]


def _measurements(
    pictures: list[NamedImage],
    model: Model,
    text: str,
    settings: RestorationSettings,
    noises: Sequence[Any],
    *,
    simulate: bool,
    keep: bool,
) -> list[Measurements]:
    """The measurements: of images of one size together, of several sizes one by one.

    `noises` are those of the pictures; `keep` takes what was clipped as measured.
    """
    import torch

    from mmdgs.identity import digest_of
    from mmdgs.operators.named import divisor, parse_operator, shape_behind
    from mmdgs.restoration.folder import Measurements, simulated

    operators: dict[tuple[int, ...], Operator] = {}
    images, shapes, bounds = [], [], []
    for picture in pictures:
        where = f"{picture.name}: " if model.any_size else ""
        try:
            picture = _cropped(picture, divisor(text)) if simulate and model.any_size else picture
            sides, channels = picture.image.shape[1:], model.shape[0]
            shape = (channels, *sides) if simulate else shape_behind(text, channels, sides)
            shape = model.sized(*shape[1:]).shape
            operators[shape] = operators.get(shape) or parse_operator(
                text, shape, seed=settings.seed
            )
            expected = tuple(shape if simulate else operators[shape].out_shape)
            image, remarks = picture.in_channels(expected[0], clean=simulate)
            _check_shape(picture.name, tuple(image.shape), expected, resize=simulate)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from error
        for remark in remarks:
            cli.tell(f"{escape(picture.name)}: {remark}")
        images.append(image)
        shapes.append(shape)
        bounds.append(None if keep or picture.scale is None else picture.scale.bounds)
    unknown = [bool(image.isnan().any()) for image in images]
    kinds = {"a map" if isinstance(noise, torch.Tensor) else noise for noise in noises}
    alike = len(operators) == len(kinds) == len({*bounds}) == 1 and not any(unknown)
    batches = [torch.stack(images)] if alike else [image[None] for image in images]
    source = {"operator": text, "images": digest_of(*batches), "simulate": simulate}
    measurements, first = [], 0
    for x, shape in zip(batches, shapes, strict=not alike):
        part = slice(first, first + len(x))
        noise: Any = noises[first]
        if isinstance(noise, torch.Tensor):
            noise = torch.stack([m.expand(len(x[0]), -1, -1) for m in noises[part]])
        operator = _known_alone(operators[shape], x) if unknown[first] else operators[shape]
        own = pictures[part]
        names = [picture.name for picture in own]
        given = Measurements(x, operator, None, names, source, noise, bounds[first], own)
        if simulate:
            y = simulated(x, operator, noise, seed=settings.seed, first=first)
            given = replace(given, y=y, truth=x)
        measurements.append(given)
        first += len(x)
    return measurements


def _known_alone(operator: Operator, y: Tensor) -> Operator:
    """The operator without what is NaN in measurements (1, ...)."""
    from mmdgs.operators import Mask, compose

    known = ~y[0].isnan()
    if isinstance(operator, Mask):
        return Mask(known & operator.keep.tensor)
    return compose(operator, Mask(known))


def tell_clipped(measurements: Sequence[Measurements]) -> None:
    """Say once how many values count as bounds."""
    low = high = total = 0
    for part in measurements:
        total += part.y.numel()
        if part.bounds is not None:
            low += int((part.y <= part.bounds[0]).sum())
            high += int((part.y >= part.bounds[1]).sum())
    if low + high:
        cli.tell(
            f"{100 * low / total:.2g}% of the values lie at 0 and {100 * high / total:.2g}% at "
            "full scale: they count as bounds, since noise was clipped there (--keep-clipped: as "
            "measured)"
        )


def _cropped(picture: NamedImage, divisor: int) -> NamedImage:
    """The image without the last rows and columns that keep its sides from being multiples."""
    height, width = picture.image.shape[1:]
    rows, columns = height - height % divisor, width - width % divisor
    if (rows, columns) == (height, width):
        return picture
    cli.tell(
        f"{escape(picture.name)}: {width} x {height} pixels were cropped to {columns} x {rows}, "
        f"multiples of {divisor}"
    )
    return replace(picture, image=picture.image[:, :rows, :columns].contiguous())


def images_of_shape(
    source: str, data_dir: Path | None, shape: tuple[int, ...], *, resize: bool
) -> ImageSet:
    """Images of a shape: clean ones are resized, measurements must fit."""
    from mmdgs.data import load_samples
    from mmdgs.data.transforms import recoloured

    channels, height, width = shape
    size = height if resize and height == width else None
    samples = load_samples(source, data_dir=data_dir, size=size)
    samples = replace(samples, images=recoloured(samples.images, channels))
    _check_shape(source, samples.shape, shape, resize=resize)
    return samples


def _check_shape(
    name: str, got: tuple[int, ...], expected: tuple[int, ...], *, resize: bool
) -> None:
    if got != expected:
        said = [" x ".join(map(str, shape)) for shape in (got, expected)]
        hint = "the model's images are" if resize else "measurements by this operator are"
        more = "" if resize else "; clean images are degraded first with --simulate"
        raise UsageError(f"{name} is {said[0]}, and {hint} {said[1]}{more}")


def _tell(summary: RestorationSummary, settings: RestorationSettings) -> None:
    cost, images = summary.cost, summary.images
    if isinstance(settings.noise, str):  # estimate
        levels = [image["noise"] for image in images]
        said = f"{min(levels):.3g} to {max(levels):.3g}; restored.json has that of each image"
        if len(levels) <= SHOWN_LEVELS:
            said = ", ".join(f"{image['noise']:.3g} ({image['name']})" for image in images)
        cli.tell(f"the noise was estimated: {escape(said)}")
    cli.tell(
        f"{cli.count_of(len(images), 'image')}, {settings.draws} draws each: {cost.forwards:,} "
        f"forwards and {cost.products:,} Jacobian products a draw, {summary.seconds:,.1f} seconds"
    )
    for image in images[:SHOWN_LEVELS] if settings.particles > 1 else ():
        error = f" ± {image['log_evidence_error']:.2g}" if "log_evidence_error" in image else ""
        share = image["least_effective"]
        said = f"{image['name']}: log p(y) {image['log_evidence']:,.1f}{error} nats, effective"
        cli.tell(escape(f"{said} share of the particles at least {share:.2g}"))
    for name, value in summary.scores.items():
        cli.output.print(f"{WORDS.get(name, name)}: {value:.4g}")
    cli.show_path("restored", summary.path)
