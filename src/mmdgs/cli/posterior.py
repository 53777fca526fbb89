"""`mmdgs posterior`: what a denoiser knows about an image, and what it invented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Argument, Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, FirstN, Overwrite, Quiet, Resume, app
from mmdgs.cli.options import options_of
from mmdgs.cli.restore import images_of_shape
from mmdgs.covariances import Diagonal, Krylov
from mmdgs.errors import UsageError
from mmdgs.options import option_names
from mmdgs.uncertainty.settings import PosteriorSettings, Region

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.data.single import NamedImage
    from mmdgs.models import Model
    from mmdgs.uncertainty.folder import PosteriorsSummary

TAKEN = {"krylov_steps", "calibrated", *option_names(PosteriorSettings)}


@app.command()
@options_of(PosteriorSettings, Krylov, only=TAKEN)
def posterior(
    context: Context,
    model: str = Argument(help="A model: one that ships (cifar10, celeba), a folder ..."),
    images: list[str] = Argument(
        help="Images: files, folders, .zip, .npz, .npy; or sets (cifar10:test)."
    ),
    sigma: str = Option(help="Standard deviation of the noise, for values in [0, 1]; or estimate."),
    out: Path = Option(
        ..., "--out", "-o", help="Folder for pictures, arrays and a page for each image."
    ),
    *,
    calibrate: str | None = Option(
        None, help="Clean images to calibrate 90% intervals on: a folder, .zip, .npz or set."
    ),
    calibration_images: int = Option(64, min=20, help="How many of them: half fit, half check."),
    n: FirstN = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **values: Any,
) -> None:
    """Show the posterior p(x | noisy x) of images of any size: mean, uncertainty, draws and
    principal components.
    """
    from mmdgs.data.single import named_images
    from mmdgs.models import load
    from mmdgs.uncertainty.folder import PosteriorFolder, posteriors_into
    from mmdgs.uncertainty.image import PosteriorWork

    settings = _settings(cli.number_or_estimate("--sigma", sigma), values)
    no_components, no_draws = settings.components == 0, settings.draws == 0
    cli.refuse_idle(
        context,
        (calibrate is None, ("calibration_images",), "--calibrate"),
        (no_components, ("region", "tolerance"), "components, and --components is 0"),
        (no_draws, ("krylov_steps",), "draws, and --draws is 0"),
        (cli.no_sets(*images, calibrate), ("data_dir",), "sets such as cifar10:test"),
    )
    PosteriorFolder(out).check(resume=resume, overwrite=overwrite)
    noisy = named_images(images, data_dir=data_dir, limit=n)
    network = load(model, device=cli.device_named(device))
    cli.warn_of_training_images(network, calibrate, *(images if settings.simulate else ()))
    held_out = None
    if calibrate is not None:
        held_out = _held_out(calibrate, data_dir, network, calibration_images)
    if not quiet:
        cli.tell(_plan(network, noisy, settings))
    with cli.resumable():
        work = PosteriorWork(network, noisy, settings, held_out=held_out)
        summary = posteriors_into(out, work, resume=resume, overwrite=overwrite)
    _tell(summary)


def _settings(sigma: float | str, values: dict[str, Any]) -> PosteriorSettings:
    """The settings of the options that were given; --calibrated requires that of the diagonal."""
    if "region" in values:
        values["region"] = _region(values["region"])
    calibrated = values.pop("calibrated", None)
    steps, probes = values.pop("krylov_steps", Krylov.steps), PosteriorSettings.diagonal.probes
    krylov = Krylov(steps, calibrated=False if calibrated is False else None)
    diagonal = Diagonal(probes, calibrated=calibrated)
    return PosteriorSettings(sigma, **values, diagonal=diagonal, krylov=krylov)


def _plan(model: Model, images: list[NamedImage], settings: PosteriorSettings) -> str:
    """What will be done."""
    from mmdgs.uncertainty.tiles import TiledDenoiser, fitted_denoiser

    sizes = [image.image.shape[1:] for image in images if len(model.shape) == 3]
    denoisers = [fitted_denoiser(model, *size) for size in sizes]
    tiles = sum(d.tiles if isinstance(d, TiledDenoiser) else 1 for d in denoisers)
    said = f"{cli.count_of(len(images), 'image')}, {settings.draws} draws of "
    said += f"{settings.krylov.steps} Krylov steps and {settings.components} components each"
    return said + (f", in {tiles:,} tiles in all" if tiles > len(images) else "")


def _region(text: str) -> Region:
    try:
        x, y, w, h = (int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"--region must be four whole numbers x,y,width,height, such as 8,8,16,16; got {text!r}"
        ) from None
    return x, y, w, h


def _held_out(source: str, data_dir: Path | None, model: Model, count: int) -> Tensor:
    """Clean images of the model's size, spread over a set."""
    from mmdgs.data import midpoints, spread

    stored = images_of_shape(source, data_dir, tuple(model.shape), resize=True).images
    return midpoints(stored[spread(len(stored), min(count, len(stored)))])


def _tell(summary: PosteriorsSummary) -> None:
    from mmdgs.uncertainty.page import WORDS

    for image in summary.images:
        cost = image["cost"]
        line = (
            f"{image['name']}: sigma {image['sigma']:.4g}, {cost['forwards']:,} forwards and "
            f"{cost['products']:,} Jacobian products, {image['seconds']:,.1f} seconds"
        )
        for text in (line, *(f"  {remark}" for remark in image["remarks"])):
            cli.tell(escape(text))
    for name, value in summary.scores.items():
        cli.output.print(f"{WORDS[name]}: {value:.4g}")
    if summary.calibration is not None:
        share = {name: f"{100 * value:.1f}%" for name, value in summary.calibration.items()}
        cli.show(
            f"calibrated 90% intervals cover {share['coverage_pixel']} of the pixels and "
            f"{share['coverage_component']} of the components of images not fitted to "
            f"(before: {share['before_pixel']} and {share['before_component']})"
        )
    only = f"{summary.images[0]['name']}/page.html" if len(summary.images) == 1 else "index.html"
    cli.show_path("page", summary.path / only)
