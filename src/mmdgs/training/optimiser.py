"""Optimisers by name, Adam and Muon, and their state as named tensors for checkpoints.

adam    Kingma and Ba (2015)
muon    Jordan et al. (2024) for matrices: momentum, made orthogonal, so that every direction of a matrix is learned
        at the same rate. Convolutions are matrices too, (outputs, inputs x pixels). Adam for all else: vectors, and
        what comes in and goes out, whose matrices have a short side
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.errors import UsageError

OPTIMISERS = ("adam", "muon")
SHORTEST = 32
"""Of a matrix that is made orthogonal: the shorter side."""
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAMS_SIZE = 0.2
"""Root mean square of an update by Adam, over the learning rate (Liu et al., 2025): Muon's are made as large."""
TINY = 1e-7


def check_optimiser(name: str) -> None:
    """Refuse an optimiser there is not."""
    if name not in OPTIMISERS:
        raise UsageError(f"optimiser must be one of {', '.join(OPTIMISERS)}, got {name!r}")


def make_optimisers(name: str, parameters: Sequence[nn.Parameter], learning_rate: float) -> list[torch.optim.Optimizer]:
    """The optimisers that share some parameters among them, none of them without any."""
    matrices = [p for p in parameters if name == "muon" and _is_matrix(p)]
    ours = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in ours]
    made: list[torch.optim.Optimizer] = []
    if rest:
        fused = all(p.device.type in ("cpu", "cuda") for p in rest)
        made.append(torch.optim.Adam(rest, lr=learning_rate, fused=fused))
    return [*made, Muon(matrices, learning_rate)] if matrices else made


def _is_matrix(p: Tensor) -> bool:
    return p.ndim >= 2 and min(len(p), p[0].numel()) >= SHORTEST


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's step, made orthogonal by Newton and Schulz's iteration in a few products.

    torch's own takes one matrix after the other: a U-Net has sixty, and a GPU would wait for the launches. Here those
    of one shape go together.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = MOMENTUM) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step along the gradients."""
        assert closure is None, "gradients come before the step"
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for parameters in alike.values():
                self._step(parameters, group["lr"], group["momentum"])

    def _step(self, parameters: Sequence[nn.Parameter], rate: float, momentum: float) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, averages, momentum)
        # The channels go last, which is their place in memory where convolutions are fast: nothing is moved then.
        updates = orthogonal(torch.stack([update.movedim(1, -1).flatten(1) for update in ahead]))
        size = ADAMS_SIZE * max(updates.shape[1:]) ** 0.5
        shaped = [
            update.to(p.dtype).reshape(len(p), *p.shape[2:], p.shape[1]).movedim(-1, 1)
            for update, p in zip(updates, parameters, strict=True)
        ]
        torch._foreach_add_(list(parameters), shaped, alpha=-rate * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Near the orthogonal matrix nearest to each of (n, a, b): singular values become about 1 (0.7 to 1.2).

    Newton and Schulz's iteration with a polynomial of degree 5 (Jordan et al., 2024), in bf16 on a GPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=TINY)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def optimiser_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Their state as named tensors: "3.exp_avg" is of parameter 3 of the first, "1:3.momentum" of the second."""
    found: dict[str, Tensor] = {}
    for number, optimiser in enumerate(optimisers):
        state = optimiser.state_dict()["state"]
        found |= {_name(number, i, key): value for i, values in state.items() for key, value in values.items()}
    return found


def load_optimisers(optimisers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put a state of `optimiser_tensors` into them."""
    for number, optimiser in enumerate(optimisers):
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            of, _, rest = name.rpartition(":")
            if int(of or 0) != number:
                continue
            index, key = rest.split(".", 1)
            parameter = parameters[int(index)]
            if value.shape == parameter.shape:  # in its layout: they go through the memory of both side by side
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            state.setdefault(int(index), {})[key] = value
        optimiser.load_state_dict(optimiser.state_dict() | {"state": state})


def _name(number: int, index: int, key: str) -> str:
    return f"{index}.{key}" if number == 0 else f"{number}:{index}.{key}"
