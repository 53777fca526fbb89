"""`mmdgs posterior`: what a denoiser knows about an image, and what it invented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    Debug,
    Device,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    app,
    count_of,
    device_named,
    messages,
    no_sets,
    number_or_estimate,
    output,
    plain_errors,
    refuse_idle,
    resumable,
    warn_of_training_images,
)
from mmdgs.cli.options import options_of
from mmdgs.cli.restore import images_of_shape
from mmdgs.errors import UsageError
from mmdgs.generation.settings import Method

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.data.single import NamedImage
    from mmdgs.generation.posterior_folder import Posteriors
    from mmdgs.generation.posteriors import PosteriorSettings
    from mmdgs.models import Model


@app.command()
@options_of(Method, only=("calibrated",))
def posterior(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model: one that ships (cifar10, celeba), a folder ...")],
    images: Annotated[
        list[str], typer.Argument(help="Images: files, folders, .zip, .npz, .npy; or sets (cifar10:test).")
    ],
    sigma: Annotated[str, typer.Option(help="Standard deviation of the noise, for values in [0, 1]; or estimate.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for pictures, arrays and a page for each image.")],
    *,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="The images are clean: add the noise first, and score the results.")
    ] = False,
    components: Annotated[int, typer.Option(min=0, help="Principal components of the uncertainty.")] = 5,
    draws: Annotated[int, typer.Option(min=0, help="Draws of each image.")] = 8,
    region: Annotated[
        str | None, typer.Option(help="x,y,width,height: the components of this part of the image.")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="Clean images to calibrate 90% intervals on: a folder, .zip, .npz or set.")
    ] = None,
    calibration_images: Annotated[int, typer.Option(min=20, help="How many of them: half fit, half check.")] = 64,
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, help="The first so many images.")] = None,
    tolerance: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Residual of each component.")] = 0.01,
    krylov_steps: Annotated[
        int, typer.Option(min=1, help="Krylov steps a draw, of one product (energies) or two.")
    ] = 20,
    data_dir: Annotated[Path | None, typer.Option(help="Where data files are.", envvar="MMDGS_DATA")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    """Show the posterior p(x | noisy x) of images of any size: mean, uncertainty, draws and principal components."""
    with plain_errors(debug):
        from mmdgs.data.single import named_images
        from mmdgs.generation.posterior_folder import PosteriorFolder, posteriors_into
        from mmdgs.generation.posteriors import PosteriorSettings
        from mmdgs.models import load

        refuse_idle(
            context,
            (calibrate is None, ("calibration_images",), "--calibrate"),
            (components == 0, ("region", "tolerance"), "components, and --components is 0"),
            (draws == 0, ("krylov_steps",), "draws, and --draws is 0"),
            (no_sets(*images, calibrate), ("data_dir",), "sets such as cifar10:test"),
        )
        PosteriorFolder(out).check(resume=resume, overwrite=overwrite)
        level = number_or_estimate("--sigma", sigma)
        asked = PosteriorSettings(components, draws, _region(region), tolerance, krylov_steps, seed, **given)
        found = named_images(images, data_dir=data_dir, limit=n)
        made = load(model, device=device_named(device))
        warn_of_training_images(made, calibrate, *(images if simulate else ()))
        held_out = None if calibrate is None else _held_out(calibrate, data_dir, made, calibration_images)
        if not quiet:
            messages.print(_plan(made, found, asked), soft_wrap=True)
        with resumable():
            result = posteriors_into(
                out,
                made,
                found,
                sigma=level,
                asked=asked,
                simulate=simulate,
                calibrate=held_out,
                resume=resume,
                overwrite=overwrite,
            )
        _tell(result)


def _plan(model: Model, images: list[NamedImage], asked: PosteriorSettings) -> str:
    """What will be done."""
    from mmdgs.generation.tiles import TiledDenoiser, fitted_denoiser

    denoisers = [fitted_denoiser(model, *one.image.shape[1:]) for one in images if len(model.shape) == 3]
    tiles = sum(one.tiles if isinstance(one, TiledDenoiser) else 1 for one in denoisers)
    drawn = f"{asked.draws} draws of {asked.krylov_steps} Krylov steps and {asked.components} components each"
    return f"{count_of(len(images), 'image')}, {drawn}" + (
        f", in {tiles:,} tiles in all" if tiles > len(images) else ""
    )


def _region(text: str | None) -> tuple[int, int, int, int] | None:
    if text is None:
        return None
    try:
        x, y, w, h = (int(one) for one in text.split(","))
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


def _tell(result: Posteriors) -> None:
    from mmdgs.generation.posterior_page import WORDS

    for one in result.images:
        cost = one["cost"]
        messages.print(
            escape(
                f"{one['name']}: sigma {one['sigma']:.4g}, {cost['forwards']:,} forwards and {cost['products']:,} "
                f"Jacobian products, {one['seconds']:,.1f} seconds"
            ),
            soft_wrap=True,
        )
        for remark in one["remarks"]:
            messages.print(f"  {escape(remark)}", soft_wrap=True)
    for name, value in result.scores.items():
        output.print(f"{WORDS[name]}: {value:.4g}")
    if result.calibration is not None:
        found = result.calibration
        output.print(
            f"calibrated 90% intervals cover {100 * found['coverage_pixel']:.1f}% of the pixels and "
            f"{100 * found['coverage_component']:.1f}% of the components of images not fitted to "
            f"(before: {100 * found['before_pixel']:.1f}% and {100 * found['before_component']:.1f}%)",
            soft_wrap=True,
        )
    where = result.path / (f"{result.images[0]['name']}/page.html" if len(result.images) == 1 else "index.html")
    output.print(f"page: [bold]{escape(str(where.resolve()))}[/bold]", soft_wrap=True)
