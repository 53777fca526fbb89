"""Checkpoints of NCSNv2 (Song & Ermon, 2020): everything is inferred from the tensors.

    [state, optimiser's state, epoch, step, moving average of the parameters]

The state's keys may carry "module." (saved from DataParallel) and include the buffer `sigmas`, the noisiest first; the
moving average has the parameters alone, and may be absent. Data lie in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.models.config import ModelConfig
from mmdgs.models.model import Model
from mmdgs.models.weights import load_weights
from mmdgs.networks.declared import parameters_as_in
from mmdgs.pickled import read_checkpoint
from mmdgs.reading import reading

PREFIX, SIGMAS, FIRST = "module.", "sigmas", "begin_conv.weight"
AVERAGE = 4  # its place in the list
SIZE = 32
CELEBA, CELEBA_SIZE = (500, 90.0), 64
"""Levels, and the largest sigma, of the public CelebA checkpoint; its images' size."""


def read_ncsnv2(path: Path, source: str = "", *, ema: bool = True, size: int | None = None) -> Model:
    """The model in a checkpoint: the moving average of its weights, or with ema=False the weights themselves.

    The network is fully convolutional, so `size` (of the images) only goes into the model's shape: 32 unless given,
    64 for the levels of the public CelebA checkpoint.
    """
    with reading(path, "an NCSNv2 checkpoint"):
        return _read(path, source, ema, size)


def _read(path: Path, source: str, ema: bool, size: int | None) -> Model:
    content = read_checkpoint(path)
    items = content if isinstance(content, list | tuple) else [content]
    state = _tensors(items[0], path) if items else {}
    if FIRST not in state or SIGMAS not in state or state[FIRST].ndim != 4 or state[SIGMAS].ndim != 1:
        raise UsageError(
            f"{path} is no NCSNv2 checkpoint: expected a list [state, optimiser, epoch, step, moving average] whose "
            f"state has {FIRST} and {SIGMAS}, got {_said(content, state)}"
        )
    sigmas = tuple(state.pop(SIGMAS).double().tolist())
    width, channels = state[FIRST].shape[:2]
    if ema:
        average = items[AVERAGE] if len(items) > AVERAGE else None
        if average is None or (isinstance(average, Mapping | list | tuple) and not average):
            raise UsageError(
                f"{path} holds no moving average (EMA) of the weights, item {AVERAGE + 1} of its list; "
                "take the raw weights with ema=False (--raw)"
            )
        state = _tensors(average, path)
        state.pop(SIGMAS, None)
    if size is None:
        size = CELEBA_SIZE if (len(sigmas), round(max(sigmas, default=0), 3)) == CELEBA else SIZE
    try:
        config = ModelConfig("ncsnv2", "score", (channels, size, size), {"width": width}, sigmas=sigmas)
        with parameters_as_in({key: value.numel() for key, value in state.items()}, path):
            model = Model.build(config, source=source or str(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    load_weights(model.network, state, path, than="NCSNv2")
    model.network.requires_grad_(False).eval()
    return model


def _tensors(state: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of a state, without the prefix of DataParallel."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"{path} is no NCSNv2 checkpoint: expected a dictionary of tensors, got {type(state).__name__}"
        )
    if not all(isinstance(key, str) for key in state):
        raise UsageError(f"{path} is no NCSNv2 checkpoint: expected tensors by their names")
    found = {key.removeprefix(PREFIX): value for key, value in state.items()}
    wrong = [key for key, value in found.items() if not isinstance(value, Tensor)]
    if wrong:
        raise UsageError(
            f"{path} is no NCSNv2 checkpoint: {wrong[0]!r} is no tensor but {type(found[wrong[0]]).__name__}"
        )
    return {key: value.detach().to(torch.float32) for key, value in found.items()}


def _said(content: Any, state: Mapping[str, Tensor]) -> str:
    keys = ", ".join(list(state)[:3])
    return f"a {type(content).__name__} whose state has {len(state)} tensors" + (f" ({keys}, ...)" if keys else "")
