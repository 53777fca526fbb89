"""MNIST with one noise level: the paper's Figures 3, 4 and 5 and its Appendix C.1, with numbers beside the pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.mnist_measures import (
    calibrations,
    held_out,
    methods,
    run_chains,
    scores,
    source,
)
from mmdgs.lab.mnist_models import (
    CURVES,
    ENERGY,
    LEARNED,
    SIGMA,
    SIGMAS,
    each,
    settings_for,
    shared,
    train_all,
)
from mmdgs.lab.mnist_probes import probe_errors
from mmdgs.lab.mnist_report import Findings, calibration_section, loss_section, map_section, probe_section
from mmdgs.lab.mnist_report_samples import chain_section, number_section, sigma_section
from mmdgs.lab.mnist_yardstick import yardstick
from mmdgs.metrics import instability
from mmdgs.runtime import threads


def run(context: Context) -> Outcome:
    """Train (or take from the folder) the models, run their chains, measure, and draw."""
    settings = settings_for(context)
    runs = train_all(context, settings)
    with threads(_alone(context)):
        by = yardstick(context, settings)
    wanted = [(source(runs, method), method) for method in methods(runs)]
    wanted += [(runs[f"energy-{sigma:g}"], "diagonal") for sigma in SIGMAS if sigma != SIGMA]
    jobs: list[Callable[[], object]] = [
        *(partial(run_chains, context, run, m, settings, quiet=shared(context)) for run, m in wanted),
        partial(held_out, context, runs, settings),
        partial(probe_errors, context, runs[ENERGY], settings),
    ]
    each(context, jobs, "chains and posteriors")

    found = {(run.name, m): run_chains(context, run, m, settings) for run, m in wanted}
    with threads(_alone(context)):
        scored = {key: scores(context, found[key], runs[key[0]], by, settings) for key in found}
    compared = [(source(runs, method).name, method) for method in methods(runs)]
    levels = [(f"energy-{sigma:g}", "diagonal") for sigma in SIGMAS]
    posteriors = held_out(context, runs, settings)
    curves = list(CURVES) if settings.curves is not None else [ENERGY, LEARNED]
    findings = Findings(
        settings=settings,
        quick=context.quick,
        seed=context.seed,
        runs=runs,
        curves=curves,
        instability={
            name: instability(runs[name].losses, window=settings.spike_window)
            for name in dict.fromkeys([*curves, ENERGY, LEARNED])
        },
        yardstick=by,
        chains={method: found[name, method] for name, method in compared},
        scores={method: scored[name, method] for name, method in compared},
        levels={sigma: found[key] for sigma, key in zip(SIGMAS, levels, strict=True)},
        level_scores={sigma: scored[key] for sigma, key in zip(SIGMAS, levels, strict=True)},
        held_out=posteriors,
        calibration=calibrations(posteriors, by.background),
        probes=probe_errors(context, runs[ENERGY], settings),
    )
    records = {
        "settings": {"sigma": SIGMA, "sigmas": SIGMAS, **asdict(settings)},
        "training": {name: run.record() for name, run in runs.items()},
        "instability": {name: asdict(one) for name, one in findings.instability.items()},
        "yardstick": by.record(),
        "posteriors": findings.scores,
        "noise_levels": {f"{sigma:g}": values for sigma, values in findings.level_scores.items()},
        "probe_errors": findings.probes,
        "calibration": findings.calibration,
    }
    parts = (
        loss_section,
        map_section,
        chain_section,
        number_section,
        sigma_section,
        probe_section,
        calibration_section,
    )
    return Outcome(records, [section(findings) for section in parts])


def _alone(context: Context) -> int | None:
    """CPU threads for work that runs by itself: its operations are too small to share."""
    return 1 if context.device.type == "cpu" else None


EXPERIMENT = Experiment(
    "mnist",
    "MNIST: one noise level, three posteriors",
    "Losses, covariances, samples and calibration of diagonal, isotropic and learned posteriors (Figures 3-5, C.1).",
    run,
)
