"""`mmdgs models`: what ships."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from mmdgs.cli.app import Debug, app, output, plain_errors
from mmdgs.tables import Table

if TYPE_CHECKING:
    from mmdgs.models.catalogue import ShippedModel

FREE = "mit"
HEADER = ("name", "output", "data", "noise levels\n(sigma / alpha)", "fitted\ncovariances", "licence", "MB")


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """List the models that ship: data, noise levels, fitted covariances, licence, size."""
    with plain_errors(debug):
        from mmdgs.models.catalogue import shipped_models

        found = shipped_models()
        if as_json:
            print(json.dumps([one.to_json() for one in found], indent=1))
            return
        note = "Denoisers also take the covariances that need no fit: diagonal, rademacher, lattice, krylov and full."
        output.print(Table("Models that ship with mmdgs", HEADER, [_row(one) for one in found], note, left=6).to_rich())
        for one in found:
            if one.licence != FREE:
                said = f"{one.names[0]} is not under the MIT licence but {one.licence}: see {one.card}"
                output.print(escape(said), soft_wrap=True)
        output.print("To draw from a denoiser: mmdgs sample NAME")


def _row(one: ShippedModel) -> list[str]:
    levels = one.config.levels
    ends = [f"{level.ratio:g}" for level in (levels[:1] + levels[-1:] if len(levels) > 1 else levels)]
    return [
        ", ".join(one.names),
        one.config.param,
        f"{one.config.trained_on}\n{'x'.join(map(str, one.config.shape))}",
        f"{len(levels)}: {' to '.join(ends)}" if levels else "none",
        "\n".join(one.fitted) or "none",
        one.licence.upper() if one.licence == FREE else one.licence,
        f"{one.bytes / 1e6:.1f}",
    ]
