"""`mmdgs convert`: pickled checkpoints to folders of safetensors and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mmdgs.cli.common import Debug, app, messages, output, plain_errors
from mmdgs.pretrained import from_pretrained
from mmdgs.pretrained.conversion import convert as convert_checkpoint


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="An NCSNv2 checkpoint (.pth), or a folder of diffusers whose weights are a pickle.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model.")],
    raw: Annotated[bool, typer.Option("--raw", help="The raw weights instead of their moving average.")] = False,
    size: Annotated[int | None, typer.Option(min=1, help="Side of the images.", show_default="32")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Convert an old pickled checkpoint to safetensors; nothing in the pickle is run."""
    with plain_errors(debug):
        found = from_pretrained(convert_checkpoint(checkpoint, out, ema=not raw, size=size, overwrite=overwrite))
        shape = "x".join(map(str, found.shape))
        first, last = (level.sigma / level.alpha for level in (found.levels[0], found.levels[-1]))
        messages.print(f"{len(found.levels)} levels, sigma / alpha {first:.4g} to {last:.4g}, images {shape}")
        output.print(f"model: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)
