"""Adam's state as named tensors, for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of Adam as named tensors: "3.exp_avg" is that of parameter 3."""
    state = optimiser.state_dict()["state"]
    return {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put a state of `optimiser_tensors` into Adam."""
    whole = optimiser.state_dict()
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        parameter = parameters[int(index)]
        if value.shape == parameter.shape:  # in its layout: fused Adam goes through the memory of both side by side
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict(whole | {"state": state})
