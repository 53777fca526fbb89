"""How networks are built: initial weights from a seed, and a bound on what a file may declare."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mmdgs.errors import UsageError
from mmdgs.randomness import seeded

SLACK_TENSORS, SLACK_NUMBERS = 1_000, 1 << 24
"""What a description may have beyond four times its weights: wrong ones are named one by one."""


def initialise(module: nn.Module, seed: int, zero: Iterable[nn.Module] = ()) -> None:
    """Give a module built under `torch.device("meta")` memory and torch's usual start, from `seed`.

    Weights and biases U(+-1/sqrt(fan in)), norms 1 and 0, everything in `zero` 0. A layer whose
    parameters have other names is left to its owner.
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


@contextlib.contextmanager
def parameters_at_most(tensors: int, numbers: int, limit: str) -> Iterator[None]:
    """Refuse a network as soon as it has more parameters; `limit` says where the bound comes from.

    Layers allocate nothing before they are registered on the meta device, so a network of a million
    layers, or of 40 GB, is refused at once.
    """
    counts = {"tensors": 0, "numbers": 0}
    most, thread = {"tensors": tensors, "numbers": numbers}, threading.get_ident()

    def count(module: nn.Module, name: str, parameter: Tensor) -> None:
        if threading.get_ident() != thread or parameter is None:
            return
        counts["tensors"] += 1
        counts["numbers"] += parameter.numel()
        for unit, total in counts.items():
            if total > most[unit]:
                raise UsageError(
                    f"the network that is described is too large: a {type(module).__name__} brings "
                    f"it to {total:,} {unit}, and {limit}"
                )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def parameters_as_in(
    tensors: Mapping[str, int], where: object
) -> contextlib.AbstractContextManager[None]:
    """Refuse a network far larger than the weights in its file: the count of numbers by tensor."""
    total = sum(tensors.values())
    limit = f"{where} holds {len(tensors):,} tensors of {total:,} numbers"
    return parameters_at_most(4 * len(tensors) + SLACK_TENSORS, 4 * total + SLACK_NUMBERS, limit)
