"""A bound on a network while it is built: what a file declares is compared with the weights that are there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mmdgs.errors import UsageError

MOST_TENSORS, MOST_NUMBERS = 5_000, 1 << 31
"""Parameters of any network: 8 GB in float32."""
SLACK_TENSORS, SLACK_NUMBERS = 1_000, 1 << 24
"""What a description may have beyond four times the weights in its file: wrong weights are then named one by one."""


@contextlib.contextmanager
def parameters_at_most(tensors: int, numbers: int, found: str) -> Iterator[None]:
    """Refuse a network as soon as it has more parameters than that; `found` says where the bound comes from.

    Layers come one after the other and allocate nothing before they are registered on the meta device, so a network of
    a million layers, or of 40 GB, is refused at once.
    """
    built = {"tensors": 0, "numbers": 0}
    mine = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: Tensor) -> None:
        if threading.get_ident() != mine or parameter is None:
            return
        built["tensors"] += 1
        built["numbers"] += parameter.numel()
        for what, most in (("tensors", tensors), ("numbers", numbers)):
            if built[what] > most:
                raise UsageError(
                    f"the network that is described is too large: a {type(module).__name__} brings it to "
                    f"{built[what]:,} {what}, and {found}"
                )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def parameters_as_in(tensors: Mapping[str, int], where: object) -> Iterator[None]:
    """Refuse a network that is far larger than the weights in its file: the count of numbers by tensor."""
    total = sum(tensors.values())
    found = f"{where} holds {len(tensors):,} tensors of {total:,} numbers"
    with parameters_at_most(4 * len(tensors) + SLACK_TENSORS, 4 * total + SLACK_NUMBERS, found):
        yield
