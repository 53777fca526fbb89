"""`mmdgs restore`: images from incomplete, blurred or noisy measurements, as draws of p(x | y)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Argument, Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, FirstN, Overwrite, Quiet, Resume, app
from mmdgs.cli.options import options_of
from mmdgs.covariances import COVARIANCES, OPTIONS, Spectral, named
from mmdgs.errors import UsageError
from mmdgs.options import option_names
from mmdgs.restoration.settings import RestorationSettings

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.data import ImageSet
    from mmdgs.restoration.folder import RestorationSummary

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
"""Images of which each one's estimated noise is printed."""


@app.command()
@options_of(RestorationSettings, *COVARIANCES.values(), only=TAKEN)
def restore(
    context: Context,
    model: str = Argument(
        help="A model of many noise levels: one that ships (cifar10), a folder ..."
    ),
    images: str = Argument(
        help="Measurements: a folder, .zip, .npz, .npy or file; or a set (cifar10:test)."
    ),
    operator: str = Option(
        help="sr:4, box:16, random:0.8, blur:1.5, motion:9, gray, mask.png (white: measured)."
    ),
    noise: str = Option(help="Standard deviation of the noise, for values in [0, 1]; or estimate."),
    out: Path = Option(
        ..., "--out", "-o", help="Folder for draws, means, uncertainties and a picture."
    ),
    *,
    simulate: bool = Option(
        False, "--simulate", help="The images are clean: degrade them first, and score the results."
    ),
    n: FirstN = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **values: Any,
) -> None:
    """Draw images that explain measurements y = A x + noise; stopped, it goes on with --resume."""
    from mmdgs.identity import digest_of
    from mmdgs.models import load
    from mmdgs.operators.named import parse_operator
    from mmdgs.restoration.folder import Measurements, RestoredFolder, restore_into, simulated

    cli.refuse_idle(context, (cli.no_sets(images), ("data_dir",), "sets such as cifar10:test"))
    RestoredFolder(out).check(resume=resume, overwrite=overwrite)
    options = {name: values.pop(name) for name in OPTIONS & values.keys()}
    covariance = named(values.pop("covariance", Spectral.name), options)
    level = cli.number_or_estimate("--noise", noise)
    if simulate and isinstance(level, str):
        raise UsageError("--simulate adds noise: give --noise as a number, not estimate")
    settings = RestorationSettings(level, covariance, **values)
    network = load(model, device=cli.device_named(device))
    if len(network.shape) != 3:
        raise UsageError(f"restoration is of images, and this model's data are {network.shape}")
    if simulate:
        cli.warn_of_training_images(network, images)
    measure = parse_operator(operator, network.shape, seed=settings.seed)
    shape = tuple(network.shape if simulate else measure.out_shape)
    x, names = images_in_units(images, data_dir, shape, resize=simulate, limit=n)
    source = {"operator": operator, "images": digest_of(x), "simulate": simulate}
    measurements = Measurements(x, measure, None, names, source)
    if simulate:
        y = simulated(x, measure, level, seed=settings.seed)  # type: ignore[arg-type]
        measurements = replace(measurements, y=y, truth=x)
    if not quiet:
        cli.tell(
            f"{cli.count_of(len(x), 'image')}, {settings.draws} draws each along "
            f"{settings.steps} noise levels, {covariance.name} covariance"
        )
    with cli.resumable():
        summary = restore_into(
            out, network, measurements, settings, resume=resume, overwrite=overwrite
        )
    _tell(summary, settings)


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


def images_in_units(
    source: str, data_dir: Path | None, shape: tuple[int, ...], *, resize: bool, limit: int | None
) -> tuple[Tensor, list[str]]:
    """Images (n, C, H, W) in [0, 1] units, measurements and files at full depth; their names."""
    import torch

    from mmdgs.data import midpoints
    from mmdgs.data.single import is_single, named_images

    if resize and not is_single(source):
        pictures = images_of_shape(source, data_dir, shape, resize=True).take(slice(limit))
        names = [str(Path(name).with_suffix("")) for name in pictures.names]
        return midpoints(pictures.images), names
    pairs = named_images([source], data_dir=data_dir, limit=limit)
    images = [image.in_channels(shape[0], clean=True)[0] for image in pairs]
    for image in images:
        _check_shape(source, tuple(image.shape), shape, resize=resize)
    return torch.stack(images), [image.name for image in pairs]


def _check_shape(
    source: str, got: tuple[int, ...], expected: tuple[int, ...], *, resize: bool
) -> None:
    if got != expected:
        said = [" x ".join(map(str, shape)) for shape in (got, expected)]
        hint = "the model's images are" if resize else "measurements by this operator are"
        more = "" if resize else "; clean images are degraded first with --simulate"
        raise UsageError(f"the images of {source} are {said[0]}, and {hint} {said[1]}{more}")


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
    for name, value in summary.scores.items():
        cli.output.print(f"{WORDS.get(name, name)}: {value:.4g}")
    cli.show_path("restored", summary.path)
