"""Heads of variance ratios (ocm.py) from their folders, for the denoiser that each was trained for."""

from __future__ import annotations

import logging
from pathlib import Path

from mmdgs.errors import UsageError
from mmdgs.models.config import VARIANCE_RATIO
from mmdgs.models.loading import load
from mmdgs.models.model import Model
from mmdgs.moments.ocm import RatioHead

logger = logging.getLogger("mmdgs")

SHOWN_DIGITS = 12


def load_head(source: str | Path | Model, denoiser: Model, *, strict: bool = True) -> RatioHead:
    """A head for `OcmMoments(denoiser, head)`: a folder of `mmdgs train --loss ocm`, on the hub, or a model.

    It is put on the device of its denoiser. A head for other weights than the denoiser's is refused; strict=False says
    so in the log instead, for weights that are the same but for their names or types.
    """
    model = load(source)
    name = "the head" if isinstance(source, Model) else f"the head {source}"
    if model.param != VARIANCE_RATIO:
        raise UsageError(
            f"{name} is none: its output is {model.param!r}, expected {VARIANCE_RATIO!r}; "
            "make one with `mmdgs train --loss ocm --denoiser ...`"
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
            raise UsageError(f"{said}; train one with `mmdgs train --loss ocm --denoiser {denoiser.source}`")
        logger.warning("%s", said)
    return model.to(denoiser.device).head_of(model.network)
