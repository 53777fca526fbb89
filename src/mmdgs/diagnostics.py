"""Chains and draws as files, chains for ArviZ, and what chains say of themselves.

    save_chain("chain.npz", gibbs_chain(...))      then: mmdgs diagnose chain.npz --out DIR
    to_arviz(chain)                                ArviZ's InferenceData, for its plots and tables
    diagnose(chain)                                R-hat, effective sample sizes, modes, and a verdict

The layout of a file: an .npz whose array `samples` is (steps, chains, ...), any event shape; optional `modes`
(K, ...) with `weights` (K,), the centres that chains must visit and their shares. Draws of posteriors are an .npz, too:
`draws` (S, N, ...), and in it or another file `truth` (N, ...) and if need be `task` (N,).
"""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import file_written_atomically, npz_opened
from mmdgs.metrics.chains import ModeCoverage, bulk_sample_sizes, mode_coverage, rank_rhat
from mmdgs.metrics.judgement import LEAST_CASES, LEAST_DRAWS

SAMPLES, MODES, WEIGHTS = "samples", "modes", "weights"
LEAST_STEPS, MOST_TASKS = 8, 24
MOST_RHAT, LEAST_SIZE, MOST_DISTANCE = 1.01, 100, 0.1
"""Vehtari et al. (2021): R-hat at most 1.01, an effective sample size of 100 a chain. The distance of modes' weights is
ours: a tenth of all states in the wrong mode."""


def save_chain(
    path: Path | str, samples: Tensor, *, modes: Tensor | None = None, weights: Tensor | None = None
) -> Path:
    """Write chains (steps, chains, ...), as `gibbs_chain` returns them, to an .npz that `mmdgs diagnose` reads."""
    path = Path(path)
    if path.suffix.lower() != ".npz":
        raise UsageError(f"a chain is written to a file that ends in .npz, got {path.name}")
    _require_chain(samples, str(path))
    arrays = {SAMPLES: samples, MODES: modes, WEIGHTS: weights}
    kept = {name: one.detach().cpu().numpy() for name, one in arrays.items() if one is not None}
    with file_written_atomically(path) as stream:
        np.savez_compressed(stream, **kept)  # type: ignore[arg-type]
    return path


def read_arrays(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Numbers of an .npz by name, as float64; nothing in it is run."""
    with npz_opened(path) as archive:
        missing = [name for name in required if name not in archive.files]
        if missing:
            have = ", ".join(archive.files) or "none"
            raise UsageError(f"{path} must hold the array {missing[0]!r}; it has {have}")
        arrays = {name: archive[name] for name in (*required, *optional) if name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":  # bytes: what is no .npy inside
            kind = getattr(array, "dtype", type(array).__name__)
            raise UsageError(f"{path}: {name!r} must hold real numbers, got {kind}")
        if not np.isfinite(array).all():
            raise UsageError(f"{path}: {name!r} holds numbers that are not finite")
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)) for name, array in arrays.items()}


def read_chain(path: Path, modes: Path | None = None, burn_in: int = 0) -> dict[str, Tensor]:
    """`samples` of a file without the burn-in, and `modes` and `weights` where they are there or in a second file."""
    found = read_arrays(path, (SAMPLES,), (MODES, WEIGHTS))
    if modes is not None:
        found |= read_arrays(modes, (MODES,), (WEIGHTS,))
    named = path if modes is None else modes
    samples, centres, weights = found[SAMPLES], found.get(MODES), found.get(WEIGHTS)
    if samples.ndim < 2 or 0 in samples.shape or len(samples) - burn_in < LEAST_STEPS:
        raise UsageError(
            f"{path}: samples must be (steps, chains, ...) with at least {LEAST_STEPS} steps after the burn-in of "
            f"{burn_in}, got {tuple(samples.shape)}"
        )
    if centres is not None and (centres.ndim < 1 or not len(centres) or centres.shape[1:] != samples.shape[2:]):
        raise UsageError(
            f"{named}: modes must be (K, *{tuple(samples.shape[2:])}), as a state is, got {tuple(centres.shape)}"
        )
    if weights is not None:
        fit = centres is not None and weights.shape == centres.shape[:1]
        if not fit or not (weights >= 0).all() or not weights.sum() > 0:
            raise UsageError(
                f"{named}: weights must be a number for each mode, none negative, got {tuple(weights.shape)}"
            )
    return found | {SAMPLES: samples[burn_in:]}


def read_draws(path: Path, truth: Path | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Draws (S, N, ...) and truth (N, ...) of a file, or of two, by task; "all" where there is no array `task`."""
    found = read_arrays(path, ("draws",) if truth is not None else ("draws", "truth"), ("task",))
    if truth is not None:
        found |= read_arrays(truth, ("truth",), ("task",))
    made, right, task = found["draws"], found["truth"], found.get("task")
    if right.ndim < 1 or made.shape[1:] != right.shape or 0 in made.shape:
        shapes = f"{tuple(made.shape)} and {tuple(right.shape)}"
        raise UsageError(f"{path}: draws must be (S, N, ...) and truth (N, ...), got {shapes}")
    if len(made) < LEAST_DRAWS:
        raise UsageError(f"{path}: at least {LEAST_DRAWS} draws of each case are needed, got {len(made)}")
    if task is not None and task.shape != right.shape[:1]:
        raise UsageError(f"{path}: task must be ({len(right)},), a number for each case, got {tuple(task.shape)}")
    parts = {"all": (made, right)}
    if task is not None:
        names = task.unique().tolist()
        if len(names) > MOST_TASKS:
            raise UsageError(f"{path}: task may hold {MOST_TASKS} different numbers at the most, got {len(names)}")
        parts = {f"task {name:g}": (made[:, task == name], right[task == name]) for name in names}
    for name, (_, cases) in parts.items():
        if len(cases) < LEAST_CASES:
            raise UsageError(f"{path}: at least {LEAST_CASES} independent cases are needed, got {len(cases)} ({name})")
    return parts


def to_arviz(chain: Float[Tensor, "steps chains ..."], name: str = "x") -> Any:
    """Chains (steps, chains, ...) as ArviZ's InferenceData, with one variable of this name."""
    arviz = _arviz()
    _require_chain(chain, "a chain")
    return arviz.from_dict(posterior={name: chain.detach().cpu().movedim(0, 1).numpy()})


def _arviz(attempts: int = 5) -> Any:
    """ArviZ, without what it announces once a day.

    It notes the day in a file in the home folder. Of two processes that do so at once, one finds the file that it was
    about to rename taken away by the other (FileNotFoundError), and tries again.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module("arviz")
    except ImportError as error:
        raise UsageError('this needs arviz, which is not installed: pip install "mmdgs[arviz]"') from error
    except FileNotFoundError:
        if attempts == 1:
            raise
        return _arviz(attempts - 1)


def _require_chain(chain: Tensor, name: str) -> None:
    if not isinstance(chain, Tensor) or chain.ndim < 2 or 0 in chain.shape or not chain.is_floating_point():
        got = f"{chain.dtype} {tuple(chain.shape)}" if isinstance(chain, Tensor) else type(chain).__name__
        raise UsageError(f"{name}: chains are a floating-point tensor (steps, chains, ...), got {got}")


@dataclass(frozen=True)
class Diagnosis:
    """R-hat and effective sample size of each coordinate (d,), the modes visited, and what is wrong, if anything."""

    rhat: Tensor
    sizes: Tensor
    coverage: ModeCoverage | None
    problems: list[str]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            return f"not converged: {'; '.join(self.problems)}"
        said = f"no sign against convergence: R-hat {self.rhat.max():.3f}, effective sample size {self.sizes.min():.0f}"
        if self.coverage is None:
            return f"{said}; modes that no chain has been to are not seen without --modes"
        return f"{said}, all {len(self.coverage.weights)} modes visited"

    def worst(self, count: int) -> list[int]:
        """The coordinates to look at first: those that never move, then by R-hat."""
        return self.rhat.nan_to_num(nan=math.inf).argsort(descending=True, stable=True)[:count].tolist()


def diagnose(
    chain: Float[Tensor, "steps chains ..."], modes: Tensor | None = None, weights: Tensor | None = None
) -> Diagnosis:
    """Judge chains by rank-normalised R-hat and effective sample size, and by the modes they should visit."""
    _require_chain(chain, "diagnose")
    rhat, sizes = rank_rhat(chain), bulk_sample_sizes(chain)
    coverage = None if modes is None else mode_coverage(chain, modes, weights)
    problems = []
    still = rhat.isnan()
    if still.any():
        problems.append(f"{int(still.sum())} of {len(rhat)} numbers never move")
    moving = rhat[~still]
    if len(moving) and moving.max() > MOST_RHAT:
        problems.append(f"R-hat {moving.max():.3g} of number {_largest(rhat)}, at most {MOST_RHAT} is good")
    least = LEAST_SIZE * chain.shape[1]
    known = sizes[~sizes.isnan()]
    if len(known) and known.min() < least:
        problems.append(f"effective sample size {known.min():.0f}, at least {least} is good")
    if coverage is not None and coverage.missed:
        problems.append(f"{len(coverage.missed)} of {len(coverage.weights)} modes were never visited")
    elif coverage is not None and coverage.distance > MOST_DISTANCE:
        problems.append(f"{100 * coverage.distance:.0f}% of the states are in the wrong mode")
    return Diagnosis(rhat, sizes, coverage, problems)


def _largest(rhat: Tensor) -> int:
    """The coordinate with the largest R-hat."""
    return int(rhat.nan_to_num(nan=-math.inf).argmax())
