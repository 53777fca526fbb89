"""Experiments: one module per table or figure."""

from experiments.experiment import Context, Experiment, Outcome, TimeIsUp
from mmdgs.workspace import Workspace

OPTIONS = {
    "fig1": "",
    "table1": "data seeds short_training",
    "fig2": "data seeds",
    "mnist": "",
    "many-levels": "",
    "inverse": "images minutes model only",
    "particles": "model images minutes only",
    "score-ksd": "minutes only",
    "levy": "minutes only case",
    "bipsda": "minutes only",
    "digs": "seeds only minutes",
    "few-steps": "model head images minutes only case",
    "probes": "model",
    "components": "model images minutes only",
    "calibration": "model many head images minutes only case",
    "covariances": "model images minutes only",
    "single-level-chains": "model images minutes only",
    "cifar10": "model many classifier images minutes",
    "table2": "model seeds images minutes only",
    "table2-seeds": "model skip_seeds minutes only",
    "photographs": "model ffdnet images minutes",
    "denoisers": "weights_dir images minutes",
    "photo-restoration": "model images minutes only case",
    "instruments": "model images minutes",
    "celeba": "model images",
    "shapes": "model minutes",
}
"""What `python -m experiments` knows, by name, and the options of `Context` that each takes."""
EXPERIMENTS = {name: Experiment(name, tuple(known.split())) for name, known in OPTIONS.items()}

__all__ = ["EXPERIMENTS", "Context", "Experiment", "Outcome", "TimeIsUp", "Workspace"]
