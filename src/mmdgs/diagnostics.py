"""Chains as files, for ArviZ, and what they say of themselves.

    save_chain("chain.npz", gibbs_chain(...))      then: mmdgs diagnose chain.npz --out DIR
    to_arviz(chain)                                ArviZ's InferenceData, for its plots and tables
    diagnose(chain)                                R-hat, effective sample sizes, modes, and a verdict

The layout of a file: an .npz whose array `samples` is (steps, chains, ...), any event shape; optional `modes`
(K, ...) with `weights` (K,), the centres that chains must visit and their shares.
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

from mmdgs.errors import UsageError, first_line
from mmdgs.files import file_written_atomically
from mmdgs.metrics.chains import ModeCoverage, bulk_sample_sizes, mode_coverage, rank_rhat

SAMPLES, MODES, WEIGHTS = "samples", "modes", "weights"
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
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            names = getattr(archive, "files", [])
            missing = [name for name in required if name not in names]
            if missing:
                have = ", ".join(names) or "no named arrays"
                raise UsageError(f"{path} must hold the array {missing[0]!r}, an .npz of arrays by name; it has {have}")
            arrays = {name: archive[name] for name in (*required, *optional) if name in names}
    except UsageError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and numpy have an error each for a damaged file
        raise UsageError(f"{path} is not an .npz of arrays, or a damaged one: {first_line(error)}") from error
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise UsageError(f"{path}: {name!r} must hold real numbers, got {array.dtype}")
        if not np.isfinite(array).all():
            raise UsageError(f"{path}: {name!r} holds numbers that are not finite")
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)) for name, array in arrays.items()}


def to_arviz(chain: Float[Tensor, "steps chains ..."], name: str = "x") -> Any:
    """Chains (steps, chains, ...) as ArviZ's InferenceData, with one variable of this name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # arviz announces its next version at import
            arviz = importlib.import_module("arviz")
    except ImportError as error:
        raise UsageError('this needs arviz, which is not installed: pip install "mmdgs[arviz]"') from error
    _require_chain(chain, "a chain")
    return arviz.from_dict(posterior={name: chain.detach().cpu().movedim(0, 1).numpy()})


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
