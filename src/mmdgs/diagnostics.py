"""Chains and draws as files, chains for ArviZ, and what chains say of themselves.

    save_chain("chain.npz", gibbs_chain(...))      then: mmdgs diagnose chain.npz --out DIR
    to_arviz(chain)                                ArviZ's InferenceData, for its plots and tables
    diagnose(chain)                                R-hat, effective sample sizes, modes, a verdict

The layout of a file: an .npz whose array `samples` is (steps, chains, ...), any event shape;
optional `modes` (K, ...) with `weights` (K,), the centres that chains must visit and their shares.
Draws of posteriors are an .npz, too: `draws` (S, N, ...), and in it or another file `truth` (N,
...) and if need be `task` (N,).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import file_written_atomically, npz_opened
from mmdgs.lazy import optional
from mmdgs.metrics.chains import ModeCoverage, bulk_sample_sizes, mode_coverage, rank_rhat
from mmdgs.metrics.judgement import LEAST_CASES, LEAST_DRAWS

LEAST_STEPS, MOST_TASKS = 8, 24
MOST_RHAT, LEAST_SIZE, MOST_DISTANCE = 1.01, 100, 0.1
"""Vehtari et al. (2021): R-hat at most 1.01, an effective sample size of 100 a chain. The distance
of modes' weights is ours: a tenth of all states in the wrong mode."""


def save_chain(
    path: Path | str, samples: Tensor, *, modes: Tensor | None = None, weights: Tensor | None = None
) -> Path:
    """Write chains (steps, chains, ...) to an .npz that `mmdgs diagnose` reads."""
    path = Path(path)
    if path.suffix.lower() != ".npz":
        raise UsageError(f"a chain is written to a file that ends in .npz, got {path.name}")
    _require_chain(samples, str(path))
    arrays = {"samples": samples, "modes": modes, "weights": weights}
    kept = {name: x.detach().cpu().numpy() for name, x in arrays.items() if x is not None}
    with file_written_atomically(path) as stream:
        np.savez_compressed(stream, **kept)  # type: ignore[arg-type]
    return path


def read_arrays(
    path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Numbers of an .npz by name, as float64; nothing in it is run."""
    with npz_opened(path) as archive:
        missing = [name for name in required if name not in archive.files]
        if missing:
            have = ", ".join(archive.files) or "none"
            raise UsageError(f"{path} must hold the array {missing[0]!r}; it has {have}")
        arrays = {name: archive[name] for name in (*required, *optional) if name in archive.files}
    for name, array in arrays.items():
        # What is no .npy inside comes as bytes.
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            kind = getattr(array, "dtype", type(array).__name__)
            raise UsageError(f"{path}: {name!r} must hold real numbers, got {kind}")
        if not np.isfinite(array).all():
            raise UsageError(f"{path}: {name!r} holds numbers that are not finite")
    as_float64 = {name: np.ascontiguousarray(x, dtype=np.float64) for name, x in arrays.items()}
    return {name: torch.from_numpy(array) for name, array in as_float64.items()}


def read_chain(path: Path, modes: Path | None = None, burn_in: int = 0) -> dict[str, Tensor]:
    """`samples` of a file without the burn-in; `modes`, `weights` if there or in a second file."""
    arrays = read_arrays(path, ("samples",), ("modes", "weights"))
    if modes is not None:
        arrays |= read_arrays(modes, ("modes",), ("weights",))
    named = path if modes is None else modes
    samples, centres, weights = arrays["samples"], arrays.get("modes"), arrays.get("weights")
    shape, event = tuple(samples.shape), samples.shape[2:]
    if len(shape) < 2 or 0 in shape or len(samples) - burn_in < LEAST_STEPS:
        need = f"(steps, chains, ...), {LEAST_STEPS} steps or more after the burn-in of {burn_in}"
        raise UsageError(f"{path}: samples must be {need}, got {shape}")
    if centres is not None and (centres.ndim < 1 or not len(centres) or centres.shape[1:] != event):
        got = tuple(centres.shape)
        raise UsageError(f"{named}: modes must be (K, *{tuple(event)}), as a state is, got {got}")
    if weights is not None:
        fit = centres is not None and weights.shape == centres.shape[:1]
        if not fit or not (weights >= 0).all() or not weights.sum() > 0:
            got = tuple(weights.shape)
            raise UsageError(f"{named}: weights must be numbers >= 0, one for each mode, got {got}")
    return arrays | {"samples": samples[burn_in:]}


def read_draws(path: Path, truth: Path | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Draws (S, N, ...) and truth (N, ...) of a file, or of two, by task ("all" without one)."""
    arrays = read_arrays(path, ("draws",) if truth is not None else ("draws", "truth"), ("task",))
    if truth is not None:
        arrays |= read_arrays(truth, ("truth",), ("task",))
    draws, right, task = arrays["draws"], arrays["truth"], arrays.get("task")
    if right.ndim < 1 or draws.shape[1:] != right.shape or 0 in draws.shape:
        shapes = f"{tuple(draws.shape)} and {tuple(right.shape)}"
        raise UsageError(f"{path}: draws must be (S, N, ...) and truth (N, ...), got {shapes}")
    if len(draws) < LEAST_DRAWS:
        raise UsageError(f"{path}: {LEAST_DRAWS} draws of each case are needed, got {len(draws)}")
    parts = {"all": (draws, right)}
    if task is not None:
        if task.shape != right.shape[:1]:
            got = tuple(task.shape)
            raise UsageError(f"{path}: task must be ({len(right)},), one for each case, got {got}")
        names = task.unique().tolist()
        if len(names) > MOST_TASKS:
            raise UsageError(f"{path}: there may be {MOST_TASKS} tasks at most, got {len(names)}")
        parts = {f"task {name:g}": (draws[:, task == name], right[task == name]) for name in names}
    for name, (_, cases) in parts.items():
        if len(cases) < LEAST_CASES:
            few = f"got {len(cases)} ({name})"
            raise UsageError(f"{path}: {LEAST_CASES} independent cases are needed, {few}")
    return parts


def to_arviz(chain: Tensor, name: str = "x") -> Any:
    """Chains (steps, chains, ...) as ArviZ's InferenceData, with one variable of this name."""
    arviz = _arviz()
    _require_chain(chain, "a chain")
    return arviz.from_dict(posterior={name: chain.detach().cpu().movedim(0, 1).numpy()})


def _arviz(attempts: int = 5) -> Any:
    """ArviZ, without what it announces once a day."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return optional("arviz")
    except FileNotFoundError:  # it notes the day in the home folder, and another process did so too
        if attempts == 1:
            raise
        return _arviz(attempts - 1)


def _require_chain(chain: Tensor, name: str) -> None:
    got = type(chain).__name__
    if isinstance(chain, Tensor):
        if chain.ndim >= 2 and 0 not in chain.shape and chain.is_floating_point():
            return
        got = f"{chain.dtype} {tuple(chain.shape)}"
    raise UsageError(f"{name}: chains are floating-point (steps, chains, ...), got {got}")


@dataclass(frozen=True)
class Diagnosis:
    """R-hat and effective sample size of each coordinate (d,), modes visited, what is wrong."""

    rhat: Tensor
    sizes: Tensor
    coverage: ModeCoverage | None
    problems: list[str]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            return f"not converged: {'; '.join(self.problems)}"
        numbers = f"R-hat {self.rhat.max():.3f}, effective sample size {self.sizes.min():.0f}"
        said = f"no sign against convergence: {numbers}"
        if self.coverage is None:
            return f"{said}; modes that no chain has been to are not seen without --modes"
        return f"{said}, all {len(self.coverage.weights)} modes visited"

    def worst(self, count: int) -> list[int]:
        """The coordinates to look at first: those that never move, then by R-hat."""
        values = self.rhat.nan_to_num(nan=math.inf)
        return values.argsort(descending=True, stable=True)[:count].tolist()


def diagnose(
    chain: Tensor, modes: Tensor | None = None, weights: Tensor | None = None
) -> Diagnosis:
    """Judge chains (steps, chains, ...) by R-hat, effective sample size, and modes to visit."""
    _require_chain(chain, "diagnose")
    rhat, sizes = rank_rhat(chain), bulk_sample_sizes(chain)
    coverage = None if modes is None else mode_coverage(chain, modes, weights)
    problems = []
    still = rhat.isnan()
    if still.any():
        problems.append(f"{int(still.sum())} of {len(rhat)} numbers never move")
    moving = rhat.nan_to_num(nan=-math.inf)
    if moving.max() > MOST_RHAT:
        worst = f"R-hat {moving.max():.3g} of number {int(moving.argmax())}"
        problems.append(f"{worst}, at most {MOST_RHAT} is good")
    least = LEAST_SIZE * chain.shape[1]
    known = sizes[~sizes.isnan()]
    if len(known) and known.min() < least:
        problems.append(f"effective sample size {known.min():.0f}, at least {least} is good")
    if coverage is not None and coverage.missed:
        missed, modes_known = len(coverage.missed), len(coverage.weights)
        problems.append(f"{missed} of {modes_known} modes were never visited")
    elif coverage is not None and coverage.distance > MOST_DISTANCE:
        problems.append(f"{100 * coverage.distance:.0f}% of the states are in the wrong mode")
    return Diagnosis(rhat, sizes, coverage, problems)
