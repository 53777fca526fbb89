"""The demo: Figures 1 and 2, Table 1 on one data set, and digits, small enough for two minutes on a laptop.

The page leads with what the numbers say and with the pictures; one table has our numbers beside the paper's.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from mmdgs.lab import digits, fig1, fig2
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Results
from mmdgs.lab.report import Figure, Section, Step
from mmdgs.lab.table1 import DEFICIT, MMD, RUNS, draw_many, published
from mmdgs.lab.toys import LEVEL, METHODS, TRAINED, ToySettings, fit, many_chains, single_chains, toy_settings
from mmdgs.tables import Table

DATASET = "rings"  # the set on which the posteriors differ most clearly
COMPARED = ("full", "isotropic", "learned")
FOLLOWING = (
    Step("sample mnist --n 25 --mean --out digits.png", "25 digits of the model that ships, in a minute"),
    Step("reproduce table1", "Table 1 at full size, on all three data sets"),
    Step("reproduce theory --quick", "the paper's theorems, checked in numbers"),
)


def run(context: Context) -> Outcome:
    """All parts on one page; the 2-D ones share their trained networks and chains."""
    context = replace(context, data=(DATASET,))
    settings = toy_settings(context)
    # Both data sets' networks train side by side; the parts below then find them in the folder.
    sets = {DATASET: fit(context, settings, ["mog", DATASET])[DATASET]}
    outcomes = {name: part.run(context) for name, part in {"fig1": fig1, "fig2": fig2, "digits": digits}.items()}
    single = single_chains(context, sets, settings, fig2.SHOWN)
    many = many_chains(context, sets, settings, "density")
    found = {"single": single.records(), "many": {"density": many.records()}}
    records = {name: outcome.records for name, outcome in outcomes.items()}
    records["table1"] = {"settings": {"sigma": LEVEL.sigma, **asdict(settings)}, **found}
    drawn = {one.name: one for outcome in outcomes.values() for section in outcome.sections for one in section.figures}
    pictures = Section("In pictures", figures=[drawn[name] for name in ("fig2", "fig1_posteriors", "digits")])
    return Outcome(records, [pictures, _numbers(single, many, settings)], takeaway(many), FOLLOWING)


def takeaway(many: Results) -> str:
    """What the chains say about the covariance; whether it decides is left to the intervals."""
    said = {method: many.number(method, DATASET, DEFICIT).value for method in (*COMPARED, "exact")}
    others = [method for method in TRAINED if method != "full" and many.has(method, DATASET)]
    decided = all(many.below("full", other, DEFICIT).holds for other in others)
    first = (
        "The full covariance, which needs no network of its own, keeps Gibbs chains nearest to the data."
        if decided
        else "At this size the chains do not show that the full covariance is nearest to the data."
    )
    return (
        f"{first} On two rings its samples are {said['full']:.1f} nats less likely than data, with one variance for "
        f"all directions {said['isotropic']:.1f}, with a learned variance {said['learned']:.1f}; with the true "
        f"posterior {abs(said['exact']):.1f}."
    )


def _numbers(single: Results, many: Results, settings: ToySettings) -> Section:
    steps = f"{settings.many_chains:,} chains of {settings.many_steps} steps"
    chains = f"MMD, one chain of {settings.chain_steps:,} steps"
    columns = [
        "posterior",
        f"deficit in nats, {steps}",
        f"MMD, {steps}",
        chains,
        "paper: MMD, one chain of 10,000 steps",
    ]
    rows, best = [], set()
    for method, title in settings.methods.items():
        own = single.values(method, DATASET) and RUNS.text(single.number(method, DATASET, RUNS))
        both = [one.text(many.number(method, DATASET, one)) for one in (DEFICIT, MMD)]
        rows.append([title, *both, own or "", published(DATASET, method)])
    order = list(settings.methods)
    for j, measure in enumerate((DEFICIT, MMD), 1):
        judged = {m: many.number(m, DATASET, measure) for m in order if m in TRAINED}
        best |= {(order.index(method), j) for method in measure.best(judged)}
    groups = settings.seeds * settings.runs
    table = Table(
        "Two rings: ours and the paper's",
        columns,
        rows,
        "Smaller is better in every column. Deficit: how much less likely the samples are under the true density than "
        f"data are; ± 95% interval over {groups} groups of chains from the true density. MMD of one chain: mean ± "
        f"standard deviation of {groups} runs, as in the paper. Bold: the best of the posteriors that come from a "
        "network, where intervals tell it from all others. The last two rows know the true density.",
        best=frozenset(best),
    )
    text = [
        "One short chain sees too little of the rings to rank the posteriors: its column stands beside the paper's "
        "and has no order. Many chains from the true density can rank them."
    ]
    claims = [many.below("full", other, measure) for measure in (DEFICIT, MMD) for other in COMPARED[1:]]
    caption = "Many chains from the true density, with 95% intervals. Dashed: independent draws from that density."
    figure = Figure("table1_many", caption, draw_many(many, {DATASET: "Rings"}, METHODS))
    return Section("In numbers", text, [table], [figure], claims)
