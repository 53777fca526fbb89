"""Figure 5: training by denoising score matching falls smoothly, training by KL jumps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from mmdgs.lab.drawing import BLUE, GREY, RED, labelled, new_figure
from mmdgs.lab.mnist_models import CURVES, ENERGY, LEARNED, MnistSettings, Training
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.metrics import Instability, instability
from mmdgs.metrics.diagnostics import running_median
from mmdgs.tables import Table

QUICK_NOTE = (
    "This is the quick version: networks this small and trained this briefly show how everything is measured, not how "
    "good the posteriors can be."
)
TITLES = {"loss-dsm": "DSM (energy)", "loss-kl": "KL (mean and std)"}
HEADER = ["run", "steps", "learning rate", "spikes", "share of steps", "largest jump", "not finite at"]


def instabilities(runs: Mapping[str, Training], settings: MnistSettings) -> dict[str, Instability]:
    """Of the two curves of the figure, and of the models that are used."""
    names = (*CURVES, ENERGY, LEARNED)
    return {name: instability(runs[name].losses, window=settings.spike_window) for name in names}


def loss_section(
    runs: Mapping[str, Training], curves: Mapping[str, Instability], settings: MnistSettings, quick: bool
) -> Section:
    """The table of spikes, the curves, and the paper's finding."""
    text = [
        "The KL loss of a learned posterior has no lower bound where pixels are always black, and its training should "
        "jump; denoising score matching (DSM) should fall smoothly.",
        *([QUICK_NOTE] if quick else []),
    ]
    for run in runs.values():
        if run.stopped_at is not None:
            left = "its best weights before that are used below" if run.model else "it left no weights to use below"
            text.append(f"The run {run.name} ended in a loss that is not finite, at step {run.stopped_at:,}; {left}.")
    note = (
        "A spike: a loss more than 10 robust standard deviations (of the changes from step to step) above the median "
        f"of the {settings.spike_window} losses before it. "
        "Largest jump: the largest rise above that median, relative to the first loss less the lowest median."
    )
    rows = [_row(runs[name], one) for name, one in curves.items()]
    table = Table("Instability of the losses", HEADER, rows, note)
    caption = "Training loss of every step (grey), its running median (blue), spikes (red)."
    figure = Figure("mnist_losses", caption, _draw(runs, curves, settings.spike_window))
    claims = stability_claims(*(curves[name] for name in CURVES))
    return Section("Figure 5: training losses", text, [table], [figure], claims)


def _row(run: Training, found: Instability) -> list[str]:
    training = run.recipe.training
    return [
        f"{'KL' if run.recipe.param == 'mean-std' else 'DSM'}, {run.name}",
        f"{found.steps:,}",
        f"{training.learning_rate:g}" + (", decaying" if training.decay else ""),
        str(len(found.spikes)),
        f"{100 * found.spike_fraction:.2f}%",
        f"{100 * found.largest_jump:.1f}%",
        "" if run.stopped_at is None else f"step {run.stopped_at:,}",
    ]


def stability_claims(dsm: Instability, kl: Instability) -> list[Claim]:
    """The paper's finding on the losses; a KL run alone that ended in a loss that is not finite bears it out."""
    failed = kl.failed_at is not None and dsm.failed_at is None
    jumps = f"{100 * kl.largest_jump:.1f}% against {100 * dsm.largest_jump:.1f}% of the improvement"
    return [
        Claim("KL has more spikes", failed or len(kl.spikes) > len(dsm.spikes), f"{len(kl.spikes)}, {len(dsm.spikes)}"),
        Claim("KL has the larger jump", failed or kl.largest_jump > dsm.largest_jump, jumps),
    ]


def _draw(runs: Mapping[str, Training], curves: Mapping[str, Instability], window: int) -> Canvas:
    """The loss of every step, its running median, and the spikes; the first steps leave the picture above."""
    canvas, axes = new_figure(1, len(CURVES), inches=(9.2, 3.2))
    for axis, (name, title) in zip(axes[0], TITLES.items(), strict=True):
        run, found = runs[name], curves[name]
        losses = run.losses[: found.steps]
        steps = torch.arange(1, len(losses) + 1)
        axis.plot(steps, losses, color=GREY, linewidth=0.5, alpha=0.8, rasterized=True)
        if len(losses) > window:
            axis.plot(steps[window:], running_median(losses, window)[0], color=BLUE, linewidth=1.2)
            seen = losses[window // 2 :]
            room = 0.06 * (seen.max() - seen.min()).item()
            axis.set_ylim(seen.min().item() - room, seen.max().item() + room)
        spikes = list(found.spikes)
        axis.plot(steps[spikes], losses[spikes], "o", color=RED, markersize=3)
        if run.stopped_at is not None:
            axis.axvline(run.stopped_at + 1, color=RED, linewidth=1.2, linestyle="--")
        labelled(axis, title, "step", "training loss" if axis is axes[0][0] else "")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return canvas
