"""Initial weights from an explicit generator: torch's layers draw theirs from the global one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from mmdgs.randomness import seeded


def initialise(module: nn.Module, seed: int, zero: Iterable[nn.Module] = ()) -> None:
    """Give a module built under `torch.device("meta")` memory and torch's usual start, from `seed`.

    Weights and biases U(+-1/sqrt(fan in)), norms 1 and 0, everything in `zero` 0. A layer whose parameters have
    other names is left to its owner.
    """
    module.to_empty(device="cpu")
    generator = seeded(seed)
    with torch.no_grad():
        for layer in module.modules():
            own = dict(layer.named_parameters(recurse=False))
            if isinstance(layer, nn.GroupNorm):
                own["weight"].fill_(1)
                own["bias"].zero_()
            elif "weight" in own:
                bound = 1 / math.sqrt(own["weight"][0].numel())
                for parameter in own.values():
                    parameter.uniform_(-bound, bound, generator=generator)
        for layer in zero:
            for parameter in layer.parameters():
                parameter.zero_()
