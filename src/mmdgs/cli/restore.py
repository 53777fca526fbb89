"""`mmdgs restore`: images from incomplete, blurred or noisy measurements, with draws that say how sure they are."""

from __future__ import annotations

from dataclasses import replace
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
from mmdgs.errors import UsageError
from mmdgs.generation.settings import Method

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.data import ImageSet
    from mmdgs.generation.restoration import RestorationSettings
    from mmdgs.generation.restored import Restoration

WORDS = {
    "psnr_draw": "PSNR of a draw (dB)",
    "psnr_mean": "PSNR of the mean (dB)",
    "ssim_draw": "SSIM of a draw",
    "ssim_mean": "SSIM of the mean",
    "calibration": "spread over error (right: 1)",
    "coverage_90": "coverage of 90% intervals",
    "crps": "CRPS",
}

SHOWN_LEVELS = 8
"""Images of which each one's estimated noise is printed."""


@app.command()
@options_of(Method, only=("products", "symmetric", "calibrated"))
def restore(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model of many noise levels: one that ships (cifar10), a folder ...")],
    images: Annotated[
        str, typer.Argument(help="Measurements: a folder, .zip, .npz, .npy or file; or a set (cifar10:test).")
    ],
    operator: Annotated[
        str, typer.Option(help="sr:4, box:16, random:0.8, blur:1.5, motion:9, gray, or mask.png (white: measured).")
    ],
    noise: Annotated[str, typer.Option(help="Standard deviation of the noise, for values in [0, 1]; or estimate.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for draws, means, uncertainties and a picture.")],
    *,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="The images are clean: degrade them first, and score the results.")
    ] = False,
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, help="The first so many images.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each image.")] = 16,
    steps: Annotated[
        int, typer.Option(min=2, help="Noise levels: evaluations of the model for each draw, but for products.")
    ] = 25,
    covariance: Annotated[str, typer.Option(help="spectral, low-rank, isotropic, diagonal, krylov ...")] = "spectral",
    chains: Annotated[
        str, typer.Option(help="multistep; bridge; or mirrored: nearer to the truth, but draws differ too little.")
    ] = "multistep",
    data_dir: Annotated[Path | None, typer.Option(help="Where data files are.", envvar="MMDGS_DATA")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Draws at a time.", show_default="by device")] = None,
    precision: Annotated[str, typer.Option(help="The network's: float32, tf32 or bf16.")] = "float32",
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **posterior: Any,
) -> None:
    """Draw images that explain measurements y = A x + noise; killed or stopped, it goes on with --resume."""
    with plain_errors(debug):
        from mmdgs.generation.identity import digest_of
        from mmdgs.generation.restoration import RestorationSettings
        from mmdgs.generation.restored import RestoredFolder, restore_into, simulated
        from mmdgs.models import load
        from mmdgs.operators.named import parse_operator

        refuse_idle(context, (no_sets(images), ("data_dir",), "sets such as cifar10:test"))
        RestoredFolder(out).check(resume=resume, overwrite=overwrite)
        settings = RestorationSettings(
            noise=_noise(noise, simulate),
            covariance=covariance,
            posterior=posterior,
            chains=chains,
            steps=steps,
            draws=draws,
            seed=seed,
            precision=precision,
        )
        where = device_named(device)
        found = load(model, device=where)
        if len(found.shape) != 3:
            raise UsageError(f"restoration is for images, and this model's data have shape {found.shape}")
        if simulate:
            warn_of_training_images(found, images)
        measure = parse_operator(operator, found.shape, seed=seed)
        shape = tuple(found.shape if simulate else measure.out_shape)
        x, names = images_in_units(images, data_dir, shape, resize=simulate, limit=n)
        y = simulated(x, measure, settings.noise, seed=seed) if simulate else x  # type: ignore[arg-type]
        if not quiet:
            asked = f"{draws} draws each along {steps} noise levels, {covariance} covariance"
            messages.print(f"{count_of(len(x), 'image')}, {asked}")
        with resumable():
            result = restore_into(
                out,
                found,
                y,
                measure,
                settings,
                truth=x if simulate else None,
                names=names,
                source={"operator": operator, "images": digest_of(x), "simulate": simulate},
                batch_size=batch_size,
                resume=resume,
                overwrite=overwrite,
            )
        _tell(result, settings)


def _noise(text: str, simulate: bool) -> float | str:
    level = number_or_estimate("--noise", text)
    if simulate and isinstance(level, str):
        raise UsageError("--simulate adds the noise that --noise says: give a number, not estimate")
    return level


def images_of_shape(source: str, data_dir: Path | None, shape: tuple[int, ...], *, resize: bool) -> ImageSet:
    """Images with the channels and size that are needed; clean ones are resized, measurements must fit."""
    from mmdgs.data import load_samples
    from mmdgs.data.transforms import recoloured

    channels, height, width = shape
    found = load_samples(source, data_dir=data_dir, size=height if resize and height == width else None)
    found = replace(found, images=recoloured(found.images, channels))
    _check_shape(source, found.shape, shape, resize=resize)
    return found


def images_in_units(
    source: str, data_dir: Path | None, shape: tuple[int, ...], *, resize: bool, limit: int | None
) -> tuple[Tensor, list[str]]:
    """Images (n, C, H, W) in [0, 1] units, float32, measurements and single files at full depth; and their names."""
    import torch

    from mmdgs.data import midpoints
    from mmdgs.data.single import is_single, named_images

    if resize and not is_single(source):
        pictures = images_of_shape(source, data_dir, shape, resize=True).take(slice(limit))
        return midpoints(pictures.images), [str(Path(name).with_suffix("")) for name in pictures.names]
    named = named_images([source], data_dir=data_dir, limit=limit)
    images = [image.in_channels(shape[0], clean=True)[0] for image in named]
    for image in images:
        _check_shape(source, tuple(image.shape), shape, resize=resize)
    return torch.stack(images), [image.name for image in named]


def _check_shape(source: str, got: tuple[int, ...], expected: tuple[int, ...], *, resize: bool) -> None:
    if got != expected:
        said = [" x ".join(map(str, shape)) for shape in (got, expected)]
        hint = "the model's images are" if resize else "measurements by this operator are"
        more = "" if resize else "; clean images are degraded first with --simulate"
        raise UsageError(f"the images of {source} are {said[0]}, and {hint} {said[1]}{more}")


def _tell(result: Restoration, settings: RestorationSettings) -> None:
    cost = result.cost
    if isinstance(settings.noise, str):  # estimate
        _tell_noise(result)
    messages.print(
        f"{count_of(result.count, 'image')}, {settings.draws} draws each: {cost.forwards:,} forwards and "
        f"{cost.products:,} Jacobian products a draw, {result.seconds:,.1f} seconds",
        soft_wrap=True,
    )
    for name, value in result.scores.items():
        output.print(f"{WORDS.get(name, name)}: {value:.4g}")
    output.print(f"restored: [bold]{escape(str(result.path.resolve()))}[/bold]", soft_wrap=True)


def _tell_noise(result: Restoration) -> None:
    """The noise that was estimated: of each image, or of many from the least to the most."""
    levels = [image["noise"] for image in result.images]
    if len(levels) <= SHOWN_LEVELS:
        said = ", ".join(f"{image['noise']:.3g} ({image['name']})" for image in result.images)
    else:
        said = f"{min(levels):.3g} to {max(levels):.3g}; restored.json has that of each image"
    messages.print(f"the noise was estimated: {escape(said)}", soft_wrap=True)
