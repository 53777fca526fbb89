"""`mmdgs posterior`: what a denoiser knows about an image, and what it invented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, FirstN, Overwrite, Quiet, Resume, app
from mmdgs.cli.arguments import ModelOption, Words, model_and_images
from mmdgs.cli.options import options_of
from mmdgs.cli.restore import images_of_shape
from mmdgs.covariances import Krylov, named
from mmdgs.errors import UsageError
from mmdgs.options import option_names
from mmdgs.uncertainty.settings import QUICK, PosteriorSettings, Region

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.models import Model
    from mmdgs.uncertainty.folder import PosteriorsSummary
    from mmdgs.uncertainty.image import PosteriorWork

TAKEN = {"krylov_steps", "calibrated", *option_names(PosteriorSettings)}


@app.command()
@options_of(PosteriorSettings, Krylov, only=TAKEN)
def posterior(
    context: Context,
    images: Words,
    sigma: str | None = Option(None, show_default="estimate", help=cli.NOISE_HELP),
    out: Path = Option(
        ..., "--out", "-o", help="Folder for pictures, arrays and a page for each image."
    ),
    *,
    model: ModelOption = None,
    quick: bool = Option(False, "--quick", help="Mean, uncertainty and 2 draws; no components."),
    calibrate: str | None = Option(
        None, help="Clean images to calibrate 90% intervals on: a folder, .zip, .npz or set."
    ),
    calibration_images: int = Option(64, min=20, help="How many of them: half fit, half check."),
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
    """Show the posterior p(x | noisy x) of images of any size: mean, uncertainty, draws and
    principal components.

    Without a model it is photo, which takes images of any size.
    """
    from mmdgs.data.instruments import parse_range
    from mmdgs.data.single import named_images, noises_of
    from mmdgs.models import load
    from mmdgs.uncertainty.folder import PosteriorFolder, posteriors_into
    from mmdgs.uncertainty.image import PosteriorWork

    name, sources = model_and_images(images, model)
    level, settings, calibrated = _settings(sigma, quick=quick, values=values)
    one_sigma = isinstance(level, float) or level == "estimate"
    by_krylov = settings.draws_by is None or isinstance(settings.draws_by, Krylov)
    cli.refuse_idle(
        context,
        (calibrate is None, ("calibration_images",), "--calibrate"),
        (settings.components == 0, ("region", "margin", "tolerance"), "components"),
        (settings.draws == 0, ("krylov_steps", "draws_by"), "draws, and --draws is 0"),
        (one_sigma, ("keep_clipped",), "noise that is not one sigma"),
        (not by_krylov, ("krylov_steps",), "draws by krylov"),
        (cli.no_sets(*sources, calibrate), ("data_dir",), "sets such as cifar10:test"),
    )
    PosteriorFolder(out).check(resume=resume, overwrite=overwrite)
    given = parse_range(value_range)
    noisy = named_images(sources, data_dir=data_dir, limit=n, given=given)
    noises = noises_of(level, noisy)
    settings = replace(settings, sigma=noises[0])
    network = load(name, device=cli.device_named(device))
    if all(len(image.image) == 1 for image in noisy):
        network = network.grey()
    cli.refuse_idle(context, (not network.any_size, ("margin",), "models of any size"))
    cli.warn_of_training_images(network, calibrate, *(sources if settings.simulate else ()))
    held_out = None
    if calibrate is not None:
        held_out = _held_out(calibrate, data_dir, network, calibration_images)
    settings = _calibrated(settings, network, calibrated)
    with cli.resumable():
        bounds = not (keep_clipped or settings.simulate)
        work = PosteriorWork(
            network, noisy, settings, held_out=held_out, noises=noises, bounds=bounds
        )
        if not quiet:
            cli.tell(escape(_plan(work)))
        summary = posteriors_into(out, work, resume=resume, overwrite=overwrite)
    _tell(summary)


def _settings(
    sigma: str | None, *, quick: bool, values: dict[str, Any]
) -> tuple[Any, PosteriorSettings, bool | None]:
    """The noise, the settings of the options, and whether they ask for calibrations."""
    if values.get("simulate") and sigma is None:
        raise UsageError(
            "--simulate adds noise to the images: say how much, such as --sigma 0.1 (the standard "
            "deviation for values in [0, 1])"
        )
    calibrated, steps = values.pop("calibrated", None), values.pop("krylov_steps", None)
    if "region" in values:
        values["region"] = _region(values["region"])
    if "draws_by" in values:
        options = {} if steps is None else {"krylov_steps": steps}
        by_krylov = values["draws_by"] == Krylov.name
        values["draws_by"] = named(values["draws_by"], options if by_krylov else None)
    elif steps is not None:
        values["draws_by"] = Krylov(steps)
    krylov = values.get("draws_by")
    values |= {"krylov": krylov} if isinstance(krylov, Krylov) else {}
    values = {**QUICK, **values} if quick else values
    level = cli.noise_named("--sigma", "estimate" if sigma is None else sigma)
    known = "estimate" if isinstance(level, Path) else level
    return level, PosteriorSettings(known, **values), calibrated


def _calibrated(
    settings: PosteriorSettings, model: Model, calibrated: bool | None
) -> PosteriorSettings:
    """Settings for a model; --calibrated requires the calibration of the diagonal."""
    from mmdgs.uncertainty.estimators import settings_for

    settings = settings_for(model, settings)
    if calibrated is None or settings.diagonal is None:
        return settings
    diagonal, krylov = replace(settings.diagonal, calibrated=calibrated), settings.krylov
    if calibrated:
        return replace(settings, diagonal=diagonal)
    plain = replace(krylov, calibrated=False)
    draws_by = plain if settings.draws_by == krylov else settings.draws_by
    return replace(settings, diagonal=diagonal, krylov=plain, draws_by=draws_by)


def _plan(work: PosteriorWork) -> str:
    """What will be done."""
    from mmdgs.uncertainty.tiles import fitted_denoiser

    model, settings = work.model, work.settings
    denoisers = [fitted_denoiser(model, *image.image.shape[1:]) for image in work.images]
    tiles = sum(getattr(denoiser, "tiles", 1) for denoiser in denoisers)
    draws = f"{cli.count_of(settings.draws or 0, 'draw')} by {settings.draws_by}"
    said = f"{cli.count_of(len(denoisers), 'image')}, {draws} and {settings.components} components "
    said += f"each, by the model {model.source}"
    return said + (f", in {tiles:,} tiles in all" if tiles > len(denoisers) else "")


def _region(text: str) -> Region:
    try:
        x, y, w, h = (int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"--region must be four whole numbers x,y,width,height, such as 8,8,16,16; got {text!r}"
        ) from None
    return x, y, w, h


def _held_out(source: str, data_dir: Path | None, model: Model, count: int) -> Tensor:
    """Clean images of the model's size, spread over a set; of one of any size, their middles."""
    import torch

    from mmdgs.data import midpoints, spread
    from mmdgs.data.single import named_images
    from mmdgs.models.fits import CROP

    if not model.any_size:
        stored = images_of_shape(source, data_dir, tuple(model.shape), resize=True).images
        return midpoints(stored[spread(len(stored), min(count, len(stored)))])
    images = named_images([source], data_dir=data_dir)
    clean = [images[i] for i in spread(len(images), min(count, len(images)))]
    side = min(CROP, *(size for named in clean for size in named.image.shape[1:]))
    corners = [((size - side) // 2 for size in named.image.shape[1:]) for named in clean]
    parts = [
        named.in_channels(model.shape[0], clean=True)[0][:, top : top + side, left : left + side]
        for named, (top, left) in zip(clean, corners, strict=True)
    ]
    return torch.stack(parts)


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
