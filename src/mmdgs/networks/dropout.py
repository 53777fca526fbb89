"""Dropout whose mask belongs to the example: the same whatever batch, device or process it is in.

torch's dropout draws from the global generator in the order of the batch, so a run split over processes, or a
batch split to fit in memory, would train on other masks. Here element i of an example is kept or not by a hash
of (the example's key, the layer, i), and the key comes from the example's own random stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

BITS = 31
WORD = (1 << BITS) - 1
# A 32-bit integer hash (T. Mueller, public domain) in 31 bits, so that no product overflows 64 and no constant 32:
# compilers for GPUs take no larger ones here. And the golden ratio of Fibonacci hashing.
MIX = 0x45D9F3B
GOLDEN = 0x61C88647


def _mixed(h: Tensor) -> Tensor:
    """31 bits to 31 bits, in int64."""
    h = ((h ^ (h >> 16)) * MIX) & WORD
    h = ((h ^ (h >> 16)) * MIX) & WORD
    return h ^ (h >> 16)


class RowDropout(nn.Module):
    """Sets elements to zero with probability `p` and scales the others by 1 / (1 - p), in training mode only.

    Needs keys (B,) of int64, set by `dropout_keys`; `layer` tells the layers of a network apart.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {p}")
        self.p = p
        self.layer = layer
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        if self.keys is None or len(self.keys) != len(x):
            raise ValueError("dropout in training mode needs one key an example: use networks.dropout_keys(...)")
        row = _mixed((self.keys + self.layer * GOLDEN) & WORD)
        element = torch.arange(x[0].numel(), device=x.device).reshape(x.shape[1:])
        h = _mixed((element * GOLDEN + row.reshape(-1, *[1] * (x.ndim - 1))) & WORD)
        keep = (h >= int(self.p * 2**BITS)).to(x.dtype)
        return x * (keep / (1 - self.p))


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
    """Give all dropout layers of a network the keys (B,) of the examples it is about to see."""
    layers = _layers(network)
    for layer in layers:
        layer.keys = keys
    try:
        yield
    finally:
        for layer in layers:
            layer.keys = None
