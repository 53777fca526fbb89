"""Heads of variance ratios (ocm.py) from their folders, for the denoiser that each was trained for."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from mmdgs.errors import UsageError
from mmdgs.models import VARIANCE_RATIO, Model, load
from mmdgs.moments.ocm import RatioHead
from mmdgs.pretrained.pretrained import Pretrained, weights_digest

logger = logging.getLogger("mmdgs")

SHOWN_DIGITS = 12


def head_digest(source: str | Path | Model) -> str:
    """The digest of a head's weights: one that was trained anew gives other samples."""
    model = source if isinstance(source, Model) else load(source)
    return weights_digest(model.network.state_dict(), "the head" if isinstance(source, Model) else source)


def load_head(source: str | Path | Model, denoiser: Pretrained, *, strict: bool = True) -> RatioHead:
    """A head for `OcmMoments(denoiser, head)`: a folder of `mmdgs train --loss ocm`, on the hub, or a model.

    It is put on the device of its denoiser. A head for other weights than the denoiser's is refused; strict=False says
    so in the log instead, for weights that are the same but for their names or types.
    """
    model = source if isinstance(source, Model) else load(source)
    name = "the head" if isinstance(source, Model) else f"the head {source}"
    if model.config.param != VARIANCE_RATIO:
        raise UsageError(
            f"{name} is none: its output is {model.config.param!r}, expected {VARIANCE_RATIO!r}; "
            "make one with `mmdgs train --loss ocm --denoiser ...`"
        )
    if model.config.shape != denoiser.shape:
        raise UsageError(
            f"{name} is for data of shape {model.config.shape}, and {denoiser.source} has {denoiser.shape}"
        )
    wanted = model.config.head["denoiser"]
    if wanted != denoiser.digest:
        said = (
            f"{name} was trained for a denoiser with the weights {wanted[:SHOWN_DIGITS]}..., and {denoiser.source} has "
            f"{denoiser.digest[:SHOWN_DIGITS]}...: its variances are those of another model"
        )
        if strict:
            raise UsageError(f"{said}; train one with `mmdgs train --loss ocm --denoiser {denoiser.source}`")
        logger.warning("%s", said)
    weights = next(denoiser.network.parameters(), None)
    model.to(torch.device("cpu") if weights is None else weights.device)
    return model.head_of(model.network)
