"""One step of training: the gradients of a batch in parts, Adam or Muon, and the weights' average.

adam    Kingma and Ba (2015)
muon    Jordan et al. (2024) for matrices: momentum, made orthogonal, so that every direction of a
        matrix is learned at the same rate. Convolutions are matrices too, (outputs, inputs x
        pixels). Adam for all else: vectors, and matrices with a short side
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mmdgs.errors import UsageError
from mmdgs.networks.dropout import dropout_keys, uses_dropout
from mmdgs.randomness import Generator, uniforms
from mmdgs.runtime import autocast
from mmdgs.training.examples import Examples, Shares
from mmdgs.training.objective import PerExampleLoss
from mmdgs.training.recipe import TrainingSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("mmdgs")

SHORTEST = 32
"""Of a matrix that is made orthogonal: the shorter side."""
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAMS_SIZE = 0.2
"""RMS of Adam's updates over the learning rate (Liu et al., 2025): Muon's are made as large."""


class _LossModule(nn.Module):
    """The loss as a module's forward pass, which is what data-parallel wrappers want to see."""

    def __init__(self, network: nn.Module, loss: PerExampleLoss) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, batch: Any, generator: Generator) -> Tensor:
        return self.loss(batch, generator)


class Stepper:
    """A network with its loss, optimisers and average; `step` takes one global batch."""

    def __init__(
        self,
        network: nn.Module,
        loss: PerExampleLoss,
        examples: Examples,
        settings: TrainingSettings,
        shares: Shares,
        accelerator: Accelerator | None,
    ) -> None:
        self.network, self.examples, self.settings = network, examples, settings
        self.shares, self.accelerator = shares, accelerator
        self.device = examples.device
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        rate = settings.learning_rate
        low = settings.precision == "bf16"
        self.optimisers = make_optimisers(settings.optimiser, self.parameters, rate, low=low)
        self.average = Average(network, settings.ema)
        self.drops = uses_dropout(network)
        self.module: nn.Module = _LossModule(network, loss)
        if accelerator:
            self.module = accelerator.prepare_model(self.module, device_placement=False)

    def step(self, indices: Tensor, number: int, rate: float) -> Tensor:
        """Step `number` of the run, on these examples; returns this process's mean loss."""
        self.shares.remember()
        while True:
            try:
                value = self._gradients(self.shares.of(indices))
                break
            except torch.OutOfMemoryError as error:
                self._split_further(error)
        if self.settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        with torch.no_grad():
            self.average.update(number)
        return value

    def loss(self, function: PerExampleLoss, batch: Any, generator: Generator) -> Tensor:
        """The loss of each example, in the settings' precision, with dropout masks of its own."""
        keys = None
        if self.drops and self.network.training:
            rows = len(batch[0]) if isinstance(batch, tuple) else len(batch)
            like = torch.empty((), device=self.device)
            keys = (uniforms((rows, 1), like, generator)[:, 0] * 2.0**24).long()
        with dropout_keys(self.network, keys), autocast(self.settings.precision, self.device):
            return function(batch, generator).float()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that moves, by group, for checkpoints."""
        groups = {"network": dict(self.network.state_dict())}
        groups["optimiser"] = optimiser_tensors(self.optimisers)
        return groups | ({"average": self.average.weights} if self.average.weights else {})

    def load(self, groups: dict[str, dict[str, Tensor]]) -> None:
        """Resume from what `tensors` gave."""
        self.network.load_state_dict({k: v.to(self.device) for k, v in groups["network"].items()})
        with torch.no_grad():
            self.average.load(groups.get("average", {}))
        load_optimisers(self.optimisers, groups["optimiser"])

    def _gradients(self, indices: Tensor) -> Tensor:
        """The gradients of the mean loss over these examples, part by part."""
        self.network.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part, streams in zip(self.shares.parts, self.shares.streams, strict=True):
            waits: Any = contextlib.nullcontext()
            if self.accelerator and part.stop != self.shares.rows:
                waits = self.accelerator.no_sync(self.module)
            with waits:
                value = self.loss(self.module, self.examples.take(indices[part], streams), streams)
                value = value.sum() / len(indices)
                value.backward()
            total += value.detach()
        return total

    def _split_further(self, error: torch.OutOfMemoryError) -> None:
        """Cut the batch in twice as many parts; the step then begins anew, with the same noise."""
        rows = self.shares.rows
        if len(self.shares.parts) == rows:
            too_large = "not even one example fits in memory; use a smaller network or image size"
            raise UsageError(too_large) from error
        parts = min(rows, 2 * len(self.shares.parts))
        if self.accelerator and self.accelerator.num_processes > 1:
            advice = f"with several processes set how it is cut: --set split={parts}"
            raise UsageError(f"a step does not fit in memory; {advice}") from error
        self.network.zero_grad(set_to_none=True)
        self.shares.cut(parts)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        message = "a step of %d examples does not fit in memory: taking it in %d parts (%s)"
        logger.warning(message, rows, parts, "the gradients are the same")


class Average:
    """The exponential moving average of a network's weights, which can replace them for a while.

    At the start it moves faster, so that the first weights are soon forgotten, unless `keep_start`
    is set: those of an earlier model are an average themselves.
    """

    def __init__(self, network: nn.Module, decay: float | None) -> None:
        self.keep_start, self.decay = False, decay
        self.live = {name: p.detach() for name, p in network.named_parameters()}
        self.weights = {} if decay is None else {n: p.clone() for n, p in self.live.items()}

    def update(self, step: int) -> None:
        """Move towards the live weights."""
        if self.decay is not None:
            decay = self.decay if self.keep_start else min(self.decay, (1 + step) / (10 + step))
            get_ema_multi_avg_fn(decay)([*self.weights.values()], [*self.live.values()], 0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with the average inside this block."""
        before = {name: self.live[name].clone() for name in self.weights}
        self.settle()
        try:
            yield
        finally:
            _copy(before, self.live)

    def settle(self) -> None:
        """Leave the average in the network for good."""
        _copy(self.weights, self.live)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over an average of the same weights."""
        _copy({name: tensors[name] for name in self.weights if name in tensors}, self.weights)


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """The tensors of one network into those of the same names."""
    for name, tensor in source.items():
        target[name].copy_(tensor)


def make_optimisers(
    name: str, parameters: Sequence[nn.Parameter], learning_rate: float, *, low: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimisers that share some parameters among them, none of them without any.

    `low` is for training in bf16: matrices are made orthogonal in bf16 on a CPU too.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in parameters:
        wide = p.ndim >= 2 and min(len(p), p[0].numel()) >= SHORTEST
        (matrices if name == "muon" and wide else rest).append(p)
    if name == "muon" and not matrices:
        need = f"matrices with at least {SHORTEST} rows and columns"
        raise UsageError(f"muon needs {need}, and this network has none: use adam or a wider one")
    fused = all(p.device.type in ("cpu", "cuda") for p in rest)
    adam = [torch.optim.Adam(rest, lr=learning_rate, fused=fused)] if rest else []
    return [*adam, Muon(matrices, learning_rate, low=low)] if matrices else [*adam]


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's step, made orthogonal by Newton and Schulz's iteration.

    torch's own takes one matrix after the other, and a U-Net has sixty: here those of one shape go
    together, so that a GPU does not wait for the launches.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = MOMENTUM, *,
        low: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.low = low

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
        # Channels go last, their place in memory where convolutions are fast: nothing is moved.
        matrices = torch.stack([update.movedim(1, -1).flatten(1) for update in ahead])
        updates = orthogonal(matrices.bfloat16() if matrices.is_cuda or self.low else matrices)
        size = ADAMS_SIZE * max(updates.shape[1:]) ** 0.5
        shaped = [
            update.to(p.dtype).reshape(len(p), *p.shape[2:], p.shape[1]).movedim(-1, 1)
            for update, p in zip(updates, parameters, strict=True)
        ]
        torch._foreach_add_(list(parameters), shaped, alpha=-rate * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Near the orthogonal matrix nearest to each of (n, a, b): singular values of 0.7 to 1.2.

    Newton and Schulz's iteration of degree 5 (Jordan et al., 2024).
    """
    x = matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def optimiser_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Their state by name: "3.exp_avg" of the first's parameter 3, "1:3.momentum" of the second."""
    return {
        f"{f'{number}:' if number else ''}{index}.{key}": value
        for number, optimiser in enumerate(optimisers)
        for index, values in optimiser.state_dict()["state"].items()
        for key, value in values.items()
    }


def load_optimisers(
    optimisers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
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
            if value.shape == parameter.shape:  # in its layout, so both are walked side by side
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            state.setdefault(int(index), {})[key] = value
        optimiser.load_state_dict(optimiser.state_dict() | {"state": state})
