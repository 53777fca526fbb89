"""`mmdgs models`: what ships; `convert`: pickles to safetensors; `export`: fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from typer import Argument, Option

from mmdgs.cli.app import app, output, show, show_path, tell
from mmdgs.tables import Table

if TYPE_CHECKING:
    from mmdgs.models.shipped import ShippedModel

ModelFolder = Annotated[Path, Option("--out", "-o", help="Folder for the model.")]
Replace = Annotated[bool, Option("--overwrite", help="Replace a model that is there.")]
FREE = "mit"
HEADER = (
    "name", "output", "data", "noise levels\n(sigma / alpha)", "fitted\ncovariances", "licence",
    "MB",
)  # fmt: skip


@app.command()
def models(as_json: bool = Option(False, "--json", help="Print JSON instead of a table.")) -> None:
    """List the models that ship: data, noise levels, fitted covariances, licence, size."""
    from mmdgs.models.shipped import shipped_models

    shipped = shipped_models()
    if as_json:
        print(json.dumps([model.to_json() for model in shipped], indent=1))
        return
    if not shipped:
        output.print("No models are installed: pip install mmdgs-models")
        return
    unfitted = "diagonal, rademacher, lattice, krylov and full"
    note = f"Denoisers also take the covariances that need no fit: {unfitted}."
    rows = [_row(model) for model in shipped]
    output.print(Table("Models that ship with mmdgs", HEADER, rows, note, left=6).to_rich())
    for model in shipped:
        if model.licence != FREE:
            licence = f"is not under the MIT licence but {model.licence}: see {model.card}"
            show(escape(f"{model.names[0]} {licence}"))
    output.print("To draw from a denoiser: mmdgs sample NAME")


def _row(model: ShippedModel) -> list[str]:
    from mmdgs.models.config import shape_in_words

    levels = model.config.levels
    ends = (levels[0], levels[-1]) if len(levels) > 1 else levels
    return [
        ", ".join(model.names),
        model.config.param,
        f"{model.config.trained_on}\n{shape_in_words(model.config.shape)}",
        f"{len(levels)}: {' to '.join(f'{level.ratio:g}' for level in ends)}" if levels else "none",
        "\n".join(model.fitted) or "none",
        model.licence.upper() if model.licence == FREE else model.licence,
        f"{model.bytes / 1e6:.1f}",
    ]


@app.command()
def convert(
    out: ModelFolder,
    checkpoint: Path = Argument(
        help="An NCSNv2 checkpoint (.pth), or a folder of diffusers whose weights are a pickle."
    ),
    raw: bool = Option(False, "--raw", help="The raw weights instead of their moving average."),
    size: int | None = Option(
        None, min=1, help="Side of an NCSNv2 checkpoint's images.", show_default="32; CelebA's 64"
    ),
    overwrite: Replace = False,
) -> None:
    """Convert an old pickled checkpoint to safetensors; nothing in the pickle is run."""
    from mmdgs.models import load
    from mmdgs.models.config import shape_in_words
    from mmdgs.models.conversion import convert_checkpoint
    from mmdgs.models.levels import in_words

    folder = convert_checkpoint(checkpoint, out, ema=not raw, size=size, overwrite=overwrite)
    model = load(folder)
    tell(f"{in_words(model.levels)}, images {shape_in_words(model.shape)}")
    show_path("model", out)


@app.command()
def export(
    out: ModelFolder,
    model: str = Argument(help="A run's folder, a model's, a name that ships, or on the hub."),
    dtype: str = Option("bf16", help="What weights are stored in: bf16 or float32."),
    shard_mb: float | None = Option(
        None, help="Files of at most so many million bytes.", show_default="one file"
    ),
    overwrite: Replace = False,
) -> None:
    """Write a model anew with its (averaged) weights in bf16, in one file or in shards."""
    from mmdgs.models.conversion import export_model
    from mmdgs.models.weights import MEGABYTE

    files = export_model(model, out, dtype=dtype, shard_mb=shard_mb, overwrite=overwrite)
    sizes = [path.stat().st_size / MEGABYTE for path in files]
    total = f"{len(files)} file(s) of weights, {sum(sizes):.3g} MB"
    tell(f"{total}, the largest {max(sizes):.3g} MB")
    show_path("model", out)
