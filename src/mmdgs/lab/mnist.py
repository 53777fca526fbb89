"""MNIST with one noise level: the paper's Figures 3, 4 and 5 and its Appendix C.1, with numbers beside the pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import together
from mmdgs.lab.mnist_chains import chain_section, chains_of, sigma_section
from mmdgs.lab.mnist_losses import instabilities, loss_section
from mmdgs.lab.mnist_models import ENERGY, SIGMA, SIGMAS, mnist_settings, train_all
from mmdgs.lab.mnist_posteriors import calibration_section, calibrations, covariance_section, posteriors_of
from mmdgs.lab.mnist_probes import probe_errors, probe_section
from mmdgs.lab.mnist_yardstick import yardstick


def run(context: Context) -> Outcome:
    """Train (or take from the folder) the models, run their chains, measure, and draw."""
    settings = mnist_settings(context)
    runs = train_all(context, settings)
    energy = runs[ENERGY].left
    jobs: list[Callable[[], object]] = [partial(yardstick, context), partial(probe_errors, context, energy, settings)]
    together(context, jobs, "yardstick and probes")
    by, probes = yardstick(context), probe_errors(context, energy, settings)
    chains = chains_of(context, runs, by, settings)
    posteriors = posteriors_of(context, runs, settings)
    calibrated = calibrations(posteriors, by.background)
    curves = instabilities(runs, settings)
    records = {
        "settings": {"sigma": SIGMA, "sigmas": SIGMAS, **asdict(settings)},
        "training": {name: one.record() for name, one in runs.items()},
        "instability": {name: asdict(one) for name, one in curves.items()},
        "yardstick": by.record(),
        "chains": chains.records(),
        "probe_errors": probes,
        "calibration": calibrated,
    }
    sections = [
        loss_section(runs, curves, settings, context.quick),
        covariance_section(posteriors, calibrated, settings, context.seed),
        chain_section(chains, by, settings),
        sigma_section(chains, settings),
        probe_section(probes),
        calibration_section(posteriors, calibrated, by.background),
    ]
    return Outcome(records, sections)
