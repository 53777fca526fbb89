"""The demo: Figure 1, Table 1 on one data set, Figure 2, and digits, small enough for two minutes on a laptop."""

from __future__ import annotations

from dataclasses import replace

from mmdgs.lab import digits, fig1, fig2, table1
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.toys import fit, toy_settings

DATASET = "rings"  # the set on which the paper's order of methods shows most clearly


def run(context: Context) -> Outcome:
    """The outcomes on one page; the 2-D ones share their trained networks and chains."""
    context = replace(context, data=(DATASET,))
    # Both data sets' networks train side by side; the parts below then find them in the folder.
    fit(context, toy_settings(context), ["mog", DATASET])
    parts = {"fig1": fig1, "table1": table1, "fig2": fig2, "digits": digits}
    outcomes = {name: part.run(context) for name, part in parts.items()}
    sections = [section for outcome in outcomes.values() for section in outcome.sections]
    return Outcome({name: outcome.records for name, outcome in outcomes.items()}, sections)
