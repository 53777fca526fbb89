"""Experiments: one file per table or figure of the paper. They return records, and draw from them."""

from mmdgs.errors import UsageError
from mmdgs.lab import (
    celeba,
    cifar10,
    covariances,
    demo,
    few_steps,
    fig1,
    fig2,
    many_levels,
    mnist,
    ocm,
    probes,
    table1,
    table2,
    theory,
)
from mmdgs.lab.experiment import Context, Experiment, Outcome, conclude
from mmdgs.lab.workspace import Workspace

MODULES = (fig1, table1, fig2, theory, mnist, many_levels, few_steps, probes, ocm, covariances, cifar10, table2, celeba)
EXPERIMENTS = {module.EXPERIMENT.name: module.EXPERIMENT for module in MODULES}
"""What `mmdgs reproduce` knows, by name."""

DEMO = demo.EXPERIMENT


def experiment(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        raise UsageError(f"unknown experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


__all__ = ["DEMO", "EXPERIMENTS", "Context", "Experiment", "Outcome", "Workspace", "conclude", "experiment"]
