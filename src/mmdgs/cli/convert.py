"""`mmdgs convert`: pickled checkpoints to folders of safetensors and JSON; `mmdgs export`: models in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mmdgs.cli.app import Debug, app, messages, output, plain_errors


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="An NCSNv2 checkpoint (.pth), or a folder of diffusers whose weights are a pickle.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model.")],
    raw: Annotated[bool, typer.Option("--raw", help="The raw weights instead of their moving average.")] = False,
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of an NCSNv2 checkpoint's images.", show_default="32; CelebA's 64")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Convert an old pickled checkpoint to safetensors; nothing in the pickle is run."""
    with plain_errors(debug):
        from mmdgs.models import load
        from mmdgs.models.conversion import convert_checkpoint
        from mmdgs.models.levels import in_words

        found = load(convert_checkpoint(checkpoint, out, ema=not raw, size=size, overwrite=overwrite))
        shape = "x".join(map(str, found.shape))
        messages.print(f"{in_words(found.levels)}, images {shape}")
        output.print(f"model: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A run's folder, a model's, a name that ships, or on the hub.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model.")],
    dtype: Annotated[str, typer.Option(help="What weights are stored in: bf16 or float32.")] = "bf16",
    shard_mb: Annotated[
        float | None, typer.Option(help="Files of at most so many million bytes.", show_default="one file")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a model anew with its (averaged) weights in bf16, in one file or in shards."""
    with plain_errors(debug):
        from mmdgs.models.conversion import export_model
        from mmdgs.models.weights import MEGABYTE

        files = export_model(model, out, dtype=dtype, shard_mb=shard_mb, overwrite=overwrite)
        sizes = [path.stat().st_size / MEGABYTE for path in files]
        messages.print(f"{len(files)} file(s) of weights, {sum(sizes):.3g} MB, the largest {max(sizes):.3g} MB")
        output.print(f"model: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)
