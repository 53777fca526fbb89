"""Checkpoints of NCSNv2 (Song & Ermon, 2020): everything is inferred from the tensors.

    [state, optimiser's state, epoch, step, moving average of the parameters]

The state's keys may carry "module." (saved from DataParallel) and include the buffer `sigmas`, the
noisiest first; the moving average has the parameters alone, and may be absent. Data lie in [0, 1].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mmdgs.errors import UsageError, shown
from mmdgs.models.config import ModelConfig
from mmdgs.models.model import Model
from mmdgs.models.weights import load_weights
from mmdgs.networks.building import parameters_as_in
from mmdgs.pickled import named_tensors, read_checkpoint
from mmdgs.reading import reading

PREFIX, SIGMAS, FIRST = "module.", "sigmas", "begin_conv.weight"
AVERAGE = 4  # its place in the list
SIZE = 32
CELEBA, CELEBA_SIZE = (500, 90.0), 64
"""Levels, and the largest sigma, of the public CelebA checkpoint; its images' size."""


def read_ncsnv2(
    path: Path, source: str = "", *, ema: bool = True, size: int | None = None
) -> Model:
    """The model in a checkpoint: its moving average, or with ema=False the weights themselves.

    The network is fully convolutional, so `size` (of the images) only goes into the model's shape:
    32 unless given, 64 for the levels of the public CelebA checkpoint.
    """
    with reading(path, "an NCSNv2 checkpoint"):
        content = read_checkpoint(path)
        items = content if isinstance(content, list | tuple) else [content]
        state = _state(items[0], path) if items else {}
        first, levels = state.get(FIRST), state.get(SIGMAS)
        if first is None or levels is None or first.ndim != 4 or levels.ndim != 1:
            raise UsageError(
                f"{path} is no NCSNv2 checkpoint: expected a list [state, optimiser, epoch, step, "
                f"moving average] whose state has {FIRST} and {SIGMAS}, got a "
                f"{type(content).__name__} whose state has {shown(list(state))}"
            )
        if ema:
            average = items[AVERAGE] if len(items) > AVERAGE else None
            if not average:
                raise UsageError(
                    f"{path} holds no moving average (EMA) of the weights, item {AVERAGE + 1} of "
                    "its list; take the raw weights with ema=False (--raw)"
                )
            state = _state(average, path)
        state.pop(SIGMAS, None)
        sigmas, (width, channels) = tuple(levels.double().tolist()), first.shape[:2]
        if size is None:
            size = (
                CELEBA_SIZE if (len(sigmas), round(max(sigmas, default=0), 3)) == CELEBA else SIZE
            )
        config = ModelConfig(
            "ncsnv2", "score", (channels, size, size), {"width": width}, sigmas=sigmas
        )
        with parameters_as_in({key: value.numel() for key, value in state.items()}, path):
            model = Model.build(config, source=source or str(path))
        load_weights(model.network, state, path, than="NCSNv2")
        model.network.requires_grad_(False).eval()
        return model


def _state(content: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of a state in float32, without the prefix of DataParallel."""
    tensors = named_tensors(content, path).items()
    return {key.removeprefix(PREFIX): value.detach().float() for key, value in tensors}
