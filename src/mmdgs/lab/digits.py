"""Digits of the MNIST model that ships: a few chains with a diagonal and with an isotropic covariance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mmdgs.generation import generate
from mmdgs.lab.drawing import pictures
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.workspace import Part
from mmdgs.models import load
from mmdgs.moments import FLOOR
from mmdgs.samplers import single_level_plan


@dataclass(frozen=True)
class DigitSettings:
    """Chains, their steps, and products with the Jacobian a step."""

    chains: int = 20
    steps: int = 15
    probes: int = 2


SETTINGS = DigitSettings()


def run(context: Context) -> Outcome:
    """Run (or take from the folder) the chains, and draw them."""
    settings = SETTINGS

    def chains(cell: Cell) -> Part:
        model = load("mnist", device=context.device)
        moments = model.posterior(**cell.what, calibrated=False)
        plan = single_level_plan(moments, model.level, steps=settings.steps, mean=True)
        found = generate(model, plan, settings.chains, seed=cell.seed, progress="digits")
        assert found.x is not None
        return Part({"repaired": found.repaired}, {"x": found.x})

    kinds: dict[str, dict[str, Any]] = {
        "diagonal": {"covariance": "rademacher", "probes": settings.probes, "floor": FLOOR},
        "isotropic": {"covariance": "isotropic"},
    }
    cells = {(kind, 0.5): options for kind, options in kinds.items()}
    found = Grid("digits", cells, chains, settings, across="sigma").run(context)
    shown = {f"{kind} covariance": found.parts[kind, 0.5].tensors["x"] for kind in kinds}
    caption = (
        f"{settings.chains} Gibbs chains of {settings.steps} steps from noise, with the energy model that comes with "
        f"mmdgs: the diagonal of the covariance from {settings.probes} products with the Jacobian, or one variance for "
        "all pixels. Each chain ends with the mean of its last posterior, which has no noise of a draw."
    )
    section = Section("Digits from one noise level", [], [], [Figure("digits", caption, pictures(shown, 3.2))])
    return Outcome({"settings": asdict(settings), "chains": found.records()}, [section])
