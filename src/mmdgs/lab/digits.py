"""Digits of the MNIST model that ships: a few chains with a diagonal and with an isotropic covariance."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.generation import sample
from mmdgs.lab.drawing import new_figure, picture
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.workspace import Part
from mmdgs.models import load

TITLES = {"diagonal": "diagonal covariance", "isotropic": "isotropic covariance"}


@dataclass(frozen=True)
class DigitSettings:
    """Chains, their steps, and products with the Jacobian a step."""

    chains: int = 20
    steps: int = 15
    probes: int = 2


SETTINGS = DigitSettings()


def run(context: Context) -> Outcome:
    """Run (or take from the folder) the chains, and draw them."""
    found = {kind: _chains(context, kind).tensors["x"] for kind in TITLES}
    caption = (
        f"{SETTINGS.chains} Gibbs chains of {SETTINGS.steps} steps from noise, with the energy model that comes with "
        f"mmdgs: the diagonal of the covariance from {SETTINGS.probes} products with the Jacobian, or one variance for "
        "all pixels. The isotropic one leaves its noise on the black background."
    )
    section = Section("Digits from one noise level", [], [], [Figure("digits", caption, _draw(found))])
    return Outcome({"settings": asdict(SETTINGS)}, [section])


def _chains(context: Context, kind: str) -> Part:
    def compute() -> Part:
        model = load("mnist", device=context.device)
        post = model.posterior(probes=SETTINGS.probes) if kind == "diagonal" else model.posterior("isotropic")
        drawn = sample(model, SETTINGS.chains, steps=SETTINGS.steps, posterior=post, seed=context.seed)
        return Part({"repaired": drawn.repaired}, {"x": drawn.x[0]})

    return context.workspace.part(f"digits-{kind}", asdict(SETTINGS) | {"seed": context.seed}, compute)


def _draw(found: dict[str, Tensor]) -> Canvas:
    canvas, axes = new_figure(1, len(found), 3.2)
    for axis, (kind, x) in zip(axes[0], found.items(), strict=True):
        picture(axis, x, TITLES[kind])
    return canvas
