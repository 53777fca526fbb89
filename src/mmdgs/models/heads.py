"""Heads of variances or covariances from their folders, for the denoiser that each was trained for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.models.config import COVARIANCE, HEADS, VARIANCE_RATIO
from mmdgs.models.loading import load
from mmdgs.models.model import Model

logger = logging.getLogger("mmdgs")

SHOWN_DIGITS = 12


LOSS = {VARIANCE_RATIO: "ocm", COVARIANCE: "covariance"}


def load_head(source: str | Path | Model, denoiser: Model, *, strict: bool = True, kind: str | None = None) -> Any:
    """A head for `OcmMoments(denoiser, head)` or `ModulatedMoments(denoiser, head)`: a folder, on the hub, or a model.

    Such folders are made by `mmdgs train --loss ocm` ("variance-ratio") and `--loss covariance` ("covariance"); `kind`
    says which is wanted.

    It is put on the device of its denoiser. A head for other weights than the denoiser's is refused; strict=False says
    so in the log instead, for weights that are the same but for their names or types.
    """
    model = load(source)
    name = "the head" if isinstance(source, Model) else f"the head {source}"
    if model.param not in ((kind,) if kind else HEADS):
        raise UsageError(
            f"{name} is none: its output is {model.param!r}, expected {kind or ' or '.join(HEADS)!r}; "
            f"make one with `mmdgs train --loss {LOSS[kind or VARIANCE_RATIO]} --denoiser ...`"
        )
    if model.shape != denoiser.shape:
        raise UsageError(f"{name} is for data of shape {model.shape}, and {denoiser.source} has {denoiser.shape}")
    wanted, digest = model.config.head["denoiser"], denoiser.digest
    if wanted != digest:
        said = (
            f"{name} was trained for a denoiser with the weights {wanted[:SHOWN_DIGITS]}..., and {denoiser.source} has "
            f"{digest[:SHOWN_DIGITS]}...: its variances are those of another model"
        )
        if strict:
            raise UsageError(
                f"{said}; train one with `mmdgs train --loss {LOSS[model.config.param]} --denoiser {denoiser.source}`"
            )
        logger.warning("%s", said)
    return model.to(denoiser.device).head_of(model.network)
