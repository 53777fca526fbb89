"""Dropout whose mask belongs to the example: the same whatever batch, device or process it is in.

torch's dropout draws from the global generator in the order of the batch, so a run split over
processes, or a batch split to fit in memory, would train on other masks. Here element i of an
example is kept or not by a hash of (the example's key, the layer, i), and the key comes from the
example's own random stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

STEPS = 256
"""Probabilities are multiples of 1 / 256: one byte of a hash decides one element."""
# A 32-bit integer hash (T. Mueller, public domain), and the golden ratio of Fibonacci hashing.
MIX, GOLDEN, HALF = 0x45D9F3B, 0x61C88647, 0xFFFF


def _mixed(h: Tensor) -> Tensor:
    """32 bits to 32 bits, in int32, whose products wrap around."""
    h = (h ^ ((h >> 16) & HALF)) * MIX
    h = (h ^ ((h >> 16) & HALF)) * MIX
    return h ^ ((h >> 16) & HALF)


SCHEMA = "(Tensor keys, int layer, int count, int dropped) -> Tensor"


# One opaque operation: inside a compiled network the hash made kernels that failed on a GPU.
@torch.library.custom_op("mmdgs::kept", mutates_args=(), schema=SCHEMA)
def _kept(keys: Tensor, layer: int, count: int, dropped: int) -> Tensor:
    """Which of `count` elements of each row are kept, (B, count), but for dropped / 256 of them."""
    row = _mixed(_mixed(keys.to(torch.int32)) + layer)
    words = torch.arange((count + 3) // 4, device=keys.device, dtype=torch.int32) * GOLDEN
    return _mixed(words + row[:, None]).view(torch.uint8)[:, :count] >= dropped


@_kept.register_fake
def _(keys: Tensor, layer: int, count: int, dropped: int) -> Tensor:
    return keys.new_empty((len(keys), count), dtype=torch.bool)


class RowDropout(nn.Module):
    """In training mode zeroes elements with probability `p` and scales the others by 1 / (1 - p).

    `dropout_keys` sets the keys (B,), `layer` tells layers apart, `p` is rounded to 1 / 256.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {p}")
        self.p, self.layer = p, layer
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        if self.keys is None or len(self.keys) != len(x):
            raise ValueError("dropout in training needs one key an example: networks.dropout_keys")
        dropped = min(round(self.p * STEPS), STEPS - 1)
        keep = _kept(self.keys, self.layer, x[0].numel(), dropped)
        # Images are trained in the channels-last layout: the mask in that order of memory.
        keep = keep.reshape(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)
        return x * (keep.to(x.dtype) / (1 - dropped / STEPS))


def _layers(network: nn.Module) -> list[RowDropout]:
    return [layer for layer in network.modules() if isinstance(layer, RowDropout) and layer.p > 0]


def uses_dropout(network: nn.Module) -> bool:
    """Whether a network has dropout that needs keys in training mode."""
    return bool(_layers(network))


def current_keys(network: nn.Module) -> Tensor | None:
    """The keys that are in force now."""
    layers = _layers(network)
    return layers[0].keys if layers else None


@contextlib.contextmanager
def dropout_keys(network: nn.Module, keys: Tensor | None) -> Iterator[None]:
    """Give a network's dropout layers the keys (B,) of the examples it is about to see, if any."""
    layers = _layers(network) if keys is not None else []
    for layer in layers:
        layer.keys = keys
    try:
        yield
    finally:
        for layer in layers:
            layer.keys = None
