"""How likely measurements are under a model: which noise, which operator, which model fits them.

    log p(y | theta),   theta = (operator, noise)

is estimated for each candidate by runs of weighted particles (samplers/particles.py). Its maximum
over a grid is the maximum-likelihood estimate of a noise level or of a blur's width; under two
models its difference says which of them an image is from. All candidates have the same random
numbers, so that most of the error is common to them and their differences are known better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.moments import Moments
from mmdgs.restoration.draws import restore
from mmdgs.restoration.settings import BRIDGE
from mmdgs.runtime import progress_bar


@dataclass(frozen=True)
class Evidence:
    """log p(y) of each candidate and measurement, and the standard error of each over the runs."""

    log: Float[Tensor, "candidates batch"]
    error: Float[Tensor, "candidates batch"]

    @property
    def best(self) -> Int[Tensor, " batch"]:
        """The number of the likeliest candidate of each measurement."""
        return self.log.argmax(0)

    def probabilities(self) -> Float[Tensor, "candidates batch"]:
        """Of the candidates given y, where each is as likely beforehand."""
        return self.log.softmax(0)


def evidence(
    model: Model | Denoiser | Moments,
    y: Float[Tensor, "batch ..."],
    operator: Any,
    *,
    noise: float | Tensor | Sequence[float | Tensor],
    particles: int = 8,
    runs: int = 8,
    progress: str | None = "evidence",
    **settings: Any,
) -> Evidence:
    """log p(y) for y = A x + noise e, by candidate: a list of operators, of noises, or of both.

    `operator` and `noise` are as in `restore`, or lists of them (two lists go together, pair by
    pair). Each estimate is the mean over `runs` of so many `particles`, so that the work is that of
    candidates x runs x particles draws. Other settings (covariance, steps, seed, levels, shape ...)
    are those of `restore`.
    """
    if runs < 2:
        raise UsageError(f"the error of an evidence needs two runs or more, got {runs}")
    pairs = _candidates(operator, noise)
    settings = {"particles": particles, "draws": runs, "chains": BRIDGE, **settings}
    values = []
    with progress_bar(len(pairs), progress, unit="candidate") as bar:
        for measure, tau in pairs:
            restored = restore(model, y, measure, noise=tau, progress=None, **settings)
            values.append(restored.log_evidence())
            bar.update()
    logs, errors = zip(*values, strict=True)
    return Evidence(torch.stack(logs), torch.stack(errors))


def _candidates(operator: Any, noise: Any) -> list[tuple[Any, Any]]:
    """Pairs of an operator and a noise; what is no list stands for all."""
    lists = [value for value in (operator, noise) if isinstance(value, list | tuple)]
    counts = {len(values) for values in lists} or {1}
    if len(counts) > 1 or 0 in counts:
        got = " and ".join(f"{len(values)}" for values in lists)
        raise UsageError(f"lists of operators and noises go together pair by pair, got {got}")
    (count,) = counts
    both = (
        value if isinstance(value, list | tuple) else [value] * count for value in (operator, noise)
    )
    return list(zip(*both, strict=True))
