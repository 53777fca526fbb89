"""The page of the demo: what the numbers say, the pictures, and our numbers beside the paper's."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from mmdgs.covariances import Isotropic, RademacherDiagonal
from mmdgs.demo import toys
from mmdgs.demo.figures import (
    APPROXIMATIONS,
    CHAINS,
    DEFICIT,
    DRAWN,
    MMD,
    POINTS,
    Cells,
    approximation,
    draw_chains,
    draw_many,
    draw_posteriors,
)  # fmt: skip
from mmdgs.demo.photograph import photograph
from mmdgs.demo.toys import FLOOR, LEVEL, METHODS, TRAINED, Toys, ToySettings
from mmdgs.models import load
from mmdgs.moments import FLOOR as PAPER_FLOOR
from mmdgs.report.drawing import pictures
from mmdgs.report.numbers import Measure, Number
from mmdgs.report.page import Claim, Figure, Outcome, Section, Step
from mmdgs.samplers import single_level_plan
from mmdgs.sampling import generate
from mmdgs.tables import Table
from mmdgs.workspace import Part, Workspace

DATA = "rings"  # the set on which the posteriors differ most clearly
# The paper's Table 1: mean and standard deviation of five runs.
PUBLISHED = {
    "mog": {"learned": (0.929, 0.343), "isotropic": (0.724, 0.361), "full": (0.305, 0.141)},
    "rings": {"learned": (0.364, 0.044), "isotropic": (0.006, 0.002), "full": (0.005, 0.001)},
    "roll": {"learned": (0.053, 0.011), "isotropic": (0.030, 0.001), "full": (0.016, 0.002)},
}
RUNS = Measure("mmd", "MMD", better="less", deviation=True)
DIGITS = {"chains": 20, "steps": 15, "probes": 2}
FOLLOWING = (
    Step(
        "mmdgs sample mnist --n 25 --mean --out digits.png",
        "25 digits of the model that ships, in a minute",
    ),
    Step("mmdgs posterior photo.jpg --out seen", "what a denoiser leaves open in your photograph"),
)
POSTERIORS_CAPTION = (
    r"Top row: the true posterior $p(x \mid x_t)$ at four noisy points $x_t$ (green crosses). "
    r"Below: "
    "contours of each approximation (orange; solid 50%, dashed 95% of its mass) over the true "
    "posterior, with the KL divergence from the true posterior to it, in nats."
)


def chains_caption(settings: ToySettings) -> str:
    steps = f"{settings.chain_steps:,} steps for each posterior (at most {DRAWN:,} points drawn)."
    return f"Data, and every state of one Gibbs chain of {steps}"


def published(name: str, method: str) -> str:
    """The paper's MMD of a posterior, with its standard deviation; empty where it has none."""
    return Number(*PUBLISHED[name][method]).text(3) if method in PUBLISHED[name] else ""


def demo(workspace: Workspace, device: torch.device, seed: int) -> Outcome:
    """Everything on one page; finished networks and chains are taken from the workspace."""
    settings = toys.QUICK
    experiment = Toys(workspace, device, settings)
    sets = experiment.fit(["mog", DATA], seed)
    rings = sets[DATA]
    parts: dict[tuple[str, str], Part] = {}

    def keep(kind: str, method: str) -> None:
        def compute() -> Part:
            if kind == "single":
                return toys.single_chains(rings, settings, method)
            return toys.many_chains(rings, settings, method, "density", seed)

        depends = {"on": settings, "seed": seed}
        parts[kind, method] = workspace.part(f"{kind}-{method}-{DATA}", depends, compute)

    jobs = [partial(keep, "single", method) for method in CHAINS]
    jobs += [partial(keep, "many", method) for method in (*METHODS, FLOOR)]
    experiment.together(jobs, "chains")
    places = [(method, name) for method in APPROXIMATIONS for name in POINTS]
    mog = sets["mog"][0]
    posteriors = {place: approximation(mog, place[0], POINTS[place[1]]) for place in places}
    samples = {(method, DATA): parts["single", method].tensors["samples"] for method in CHAINS}
    figures = [
        Figure("fig2", chains_caption(settings), draw_chains({DATA: rings[0]}, samples)),
        Figure("fig1_posteriors", POSTERIORS_CAPTION, draw_posteriors(posteriors)),
        _digits(workspace, device, seed),
    ]
    singles = {(method, DATA): parts["single", method].values for method in CHAINS}
    manys = {(method, DATA): parts["many", method].values for method in (*METHODS, FLOOR)}
    records = {
        "settings": {"sigma": LEVEL.sigma, **asdict(settings), "digits": DIGITS},
        "posteriors": _records(posteriors),
        "single": _records(singles),
        "many": _records(manys),
    }
    seen, photographs = photograph(workspace, device, seed)
    records["photograph"] = [{"row": row, **values} for row, values in photographs.items()]
    numbers = _numbers(singles, manys, settings)
    sections = [Section("In pictures", figures=figures), numbers, seen]
    return Outcome(records, sections, takeaway(manys), FOLLOWING)


def _records(cells: Cells) -> list[dict[str, Any]]:
    return [{"row": row, "column": column, **cells[row, column]} for row, column in cells]


def takeaway(many: Cells) -> str:
    """What the chains say about the covariance; whether it decides is left to the intervals."""
    deficits = {method: DEFICIT.of(values).value for (method, _), values in many.items()}
    others = [method for method in TRAINED if method != "full" and method in deficits]
    better = [DEFICIT.compared(many["full", DATA], many[other, DATA])[0] for other in others]
    first = (
        "The full covariance, which needs no network of its own, keeps Gibbs chains nearest to the "
        "data."
        if all(better)
        else "At this size the chains do not show that the full covariance is nearest to the data."
    )
    return (
        f"{first} On two rings its samples are {deficits['full']:.1f} nats less likely than data, "
        f"with one variance for all directions {deficits['isotropic']:.1f}, with a learned "
        f"variance {deficits['learned']:.1f}; with the true posterior {abs(deficits['exact']):.1f}."
    )


def _numbers(single: Cells, many: Cells, settings: ToySettings) -> Section:
    steps = f"{settings.many_chains:,} chains of {settings.many_steps} steps"
    header = [
        "posterior",
        f"deficit in nats, {steps}",
        f"MMD, {steps}",
        f"MMD, one chain of {settings.chain_steps:,} steps",
        "paper: MMD, one chain of 10,000 steps",
    ]
    rows, best = [], set()
    for method, title in METHODS.items():
        both = [measure.text(measure.of(many[method, DATA])) for measure in (DEFICIT, MMD)]
        own = RUNS.text(RUNS.of(single[method, DATA])) if (method, DATA) in single else ""
        rows.append([title, *both, own, published(DATA, method)])
    for j, measure in enumerate((DEFICIT, MMD), 1):
        numbers = {m: measure.of(many[m, DATA]) for m in METHODS if m in TRAINED}
        best |= {(list(METHODS).index(method), j) for method in measure.best(numbers)}
    groups = settings.seeds * settings.runs
    note = (
        "Smaller is better in every column. Deficit: how much less likely the samples are under "
        f"the true density than data are; ± 95% interval over {groups} groups of chains from the "
        f"true density. MMD of one chain: mean ± standard deviation of {groups} runs, as in the "
        f"paper. Bold: the best of the posteriors that come from a network, where intervals tell "
        "it from all others. The last two rows know the true density."
    )
    table = Table("Two rings: ours and the paper's", header, rows, note, best=frozenset(best))
    text = [
        "One short chain sees too little of the rings to rank the posteriors: its column stands "
        "beside the paper's and has no order. Many chains from the true density can rank them."
    ]
    claims = [
        Claim(
            f"full has a better {measure.title} than {other}",
            *measure.compared(many["full", DATA], many[other, DATA]),
        )
        for measure in (DEFICIT, MMD)
        for other in ("isotropic", "learned")
    ]
    caption = "Many chains from the true density, with 95% intervals; dashed: independent draws."
    figure = Figure("table1_many", caption, draw_many(many, {DATA: "Rings"}, METHODS))
    return Section("In numbers", text, [table], [figure], claims)


def _digits(workspace: Workspace, device: torch.device, seed: int) -> Figure:
    """Digits of the energy that ships: chains with a diagonal and with an isotropic covariance."""
    chains, steps, probes = DIGITS.values()
    covariances = {
        "diagonal": RademacherDiagonal(probes, floor=PAPER_FLOOR),
        "isotropic": Isotropic(calibrated=False),
    }

    def compute(kind: str) -> Part:
        model = load("mnist", device=device)
        moments = model.posterior(covariances[kind])
        plan = single_level_plan(moments, model.level, steps=steps, mean=True)
        images = generate(model, plan, chains, seed=seed, progress="digits").x
        assert images is not None
        return Part({}, {"x": images})

    shown = {
        f"{kind} covariance": workspace.part(
            f"digits-{kind}", {"on": DIGITS, "seed": seed}, partial(compute, kind)
        ).tensors["x"]
        for kind in covariances
    }
    caption = (
        f"{chains} Gibbs chains of {steps} steps from noise, with the energy model that comes with "
        f"mmdgs: the diagonal of the covariance from {probes} products with the Jacobian, or one "
        f"variance for all pixels. Each chain ends with the mean of its last posterior, which has "
        "no noise of a draw."
    )
    return Figure("digits", caption, pictures(shown, 3.2))
