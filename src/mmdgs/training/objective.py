"""What a step minimises: a model's loss at noise levels drawn for each example.

An energy's denoiser D = (x_t - sigma^2 grad f) / alpha has a gradient inside, and torch.compile
differentiates a function once only. So `CompiledEnergy` computes

    forward     grad f(x_t), compiled, nothing kept for later
    backward    for a cotangent u of grad f, the gradient in the weights of u' grad f(x_t), which is
                the forward-mode derivative of f along u; its reverse pass is compiled too

That is eight forward passes' work in place of six, but torch's second derivative of a convolution
convolves with kernels as large as the image, and memory holds one pass at a time.

A small network's thousand short kernels take longer to launch than to run: there, on a GPU, both
functions are recorded as CUDA graphs, whose results the next step overwrites, so they are copied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdgs import losses
from mmdgs.denoisers import Compiled, Denoiser, EnergyDenoiser, raise_unless_compiler
from mmdgs.derivatives import load_forward_mode
from mmdgs.errors import UsageError, unknown_name
from mmdgs.models import CLASSES, COVARIANCE, MEAN_STD, VARIANCE_RATIO, Model
from mmdgs.moments import LearnedMoments
from mmdgs.networks.dropout import current_keys, dropout_keys, uses_dropout
from mmdgs.noise import AnyLevel, NoiseLevel, NoiseLevels
from mmdgs.randomness import Generator, randn, uniforms

PerExampleLoss = Callable[[Any, Generator], Tensor]
"""(batch as the examples give it, generator) -> one loss per example."""

LevelDraw = Callable[[Tensor, Generator], AnyLevel]
"""(batch (B, ...), generator) -> the level of all rows, or one for each."""

MEDIAN, LOG_STD = math.exp(-1.2), 1.2
"""Of sigma / alpha, and of its logarithm, in EDM's training (Karras et al., 2022, table 1)."""
SMALL = 8_000_000
"""Networks of fewer parameters are bound by launches: MNIST's by a factor of 2.4 on an H200."""


def loss_of(
    model: Model,
    *,
    weighting: str | None = None,
    draw: str | None = None,
    jitter: float | None = None,
    denoiser: Model | None = None,
    probes: int | None = None,
    compiled: bool = False,
) -> PerExampleLoss:
    """The loss of a model's parametrisation, its network through torch.compile if asked.

    `weighting` (losses.WEIGHTINGS) and `jitter` are for denoisers, `draw` (`draw_named`) for many
    levels, `denoiser` and `probes` for a head of variance ratios.
    """
    param, plain = model.config.param, model.network
    if param == CLASSES:
        return lambda pair, _: functional.cross_entropy(plain(pair[0]), pair[1], reduction="none")
    network = Compiled(plain) if compiled else plain
    drawn = level_draw(model.levels, draw)
    if param == MEAN_STD:
        moments = LearnedMoments(network)
        return lambda x, generator: losses.kl(moments, x, drawn(x, generator), generator=generator)
    if param in (VARIANCE_RATIO, COVARIANCE):
        assert denoiser is not None, "a head is trained for a denoiser"
        head, teacher = model.head_of(network), denoiser
        mean = _compiled(teacher) if compiled and param == COVARIANCE else teacher

        def of_head(x: Tensor, generator: Generator) -> Tensor:
            x = teacher.scaled(x)
            level = drawn(x, generator)
            if param == COVARIANCE:
                return losses.covariance(head, mean, x, level, generator=generator)
            how: dict[str, Any] = {"probes": probes or 1, "weight": head.scale.weight}
            return losses.ocm(head, teacher, x, level, generator=generator, **how)

        return of_head
    trained = _compiled(model) if compiled else model.denoiser_of(model.network)
    weigh = losses.WEIGHTINGS[weighting or "score"]

    def dsm(x: Tensor, generator: Generator) -> Tensor:
        level = drawn(x, generator)
        stated = jittered(level, jitter, x, generator) if jitter else None
        return losses.dsm(trained, x, level, generator=generator, weighting=weigh, stated=stated)

    return dsm


def _compiled(model: Model) -> Denoiser:
    denoiser = model.denoiser_of(model.network)
    if isinstance(denoiser, EnergyDenoiser):
        return CompiledEnergy(denoiser, model.network)
    return Compiled(denoiser)


def level_draw(levels: Sequence[NoiseLevel], name: str | None = None) -> LevelDraw:
    """How to draw a level for each row; of one level there is nothing to draw."""
    if len(levels) > 1:
        return draw_named(name or "uniform")(levels)
    (only,) = levels
    return lambda x, generator: only


class UniformDraw:
    """One of some levels for each row, each as likely as any other."""

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        self.count = len(levels)
        rows = [[level.alpha, level.sigma] for level in levels]
        self.table = torch.tensor(rows, dtype=torch.float64)

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        self.table = self.table.to(x)
        index = (_row_uniforms(x, generator) * self.count).long().clamp(max=self.count - 1)
        return NoiseLevels(alpha=self.table[index, 0], sigma=self.table[index, 1])


class LogNormalDraw:
    """log(sigma / alpha) normal for each row, clamped to the levels' ends (Karras et al., 2022).

    Any level between the ends, with their kind of alpha: 1, or variance preserving.
    """

    def __init__(self, levels: Sequence[NoiseLevel], median: float = MEDIAN) -> None:
        self.preserving = all(abs(level.alpha**2 + level.sigma**2 - 1) < 1e-6 for level in levels)
        if not self.preserving and any(level.alpha != 1 for level in levels):
            kinds = "alpha = 1 or alpha^2 + sigma^2 = 1"
            raise UsageError(f"the log-normal draw needs levels with {kinds}; use uniform")
        ratios = [level.sigma / level.alpha for level in levels]
        self.ends = math.log(min(ratios)), math.log(max(ratios))
        self.middle = math.log(median)

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        normal = randn((len(x), 1), x, generator).reshape(-1, *[1] * (x.ndim - 1))
        ratio = (self.middle + LOG_STD * normal).clamp(*self.ends).exp()
        alpha = (1 + ratio**2).rsqrt() if self.preserving else torch.ones_like(ratio)
        return NoiseLevels(alpha=alpha, sigma=alpha * ratio)


class MixedDraw:
    """For each row one of the two draws above, each with probability 1/2.

    The log-normal draw alone has hardly any level above 5, and Gibbs and Langevin visit all.
    """

    def __init__(self, levels: Sequence[NoiseLevel], median: float = MEDIAN) -> None:
        self.uniform, self.lognormal = UniformDraw(levels), LogNormalDraw(levels, median)

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        uniform, lognormal = self.uniform(x, generator), self.lognormal(x, generator)
        coin = _row_uniforms(x, generator) < 0.5
        alpha = torch.where(coin, uniform.alpha, lognormal.alpha)
        return NoiseLevels(alpha=alpha, sigma=torch.where(coin, uniform.sigma, lognormal.sigma))


DRAWS: dict[str, Callable[..., LevelDraw]] = {
    "uniform": UniformDraw,
    "lognormal": LogNormalDraw,
    "mixed": MixedDraw,
}
"""The draws by name, for recipes."""


def draw_named(name: str) -> Callable[[Sequence[NoiseLevel]], LevelDraw]:
    """One of `DRAWS`; "lognormal:0.12" and "mixed:0.12" have another median of sigma / alpha."""
    kind, separator, text = name.partition(":")
    if kind not in DRAWS:
        raise unknown_name("level_draw", name, DRAWS)
    if not separator:
        return DRAWS[kind]
    try:
        median = float(text)
    except ValueError:
        median = math.nan
    if kind == "uniform" or not 0 < median < math.inf:
        form = "lognormal:MEDIAN or mixed:MEDIAN with a positive number"
        raise UsageError(f"a level_draw with a colon is {form}, got {name!r}")
    return partial(DRAWS[kind], median=median)


def jittered(level: AnyLevel, jitter: float, x: Tensor, generator: Generator) -> NoiseLevels:
    """Levels off by up to a factor e^jitter either way, log-uniformly.

    A network that is given these estimates the noise itself, within a narrow range, and tolerates
    samplers whose states have more or less noise than their level says (docs/use/sample.md).
    """
    drawn = _row_uniforms(x, generator)
    alpha = level.alpha if isinstance(level.alpha, Tensor) else torch.full_like(drawn, level.alpha)
    return NoiseLevels(alpha=alpha, sigma=level.sigma * (jitter * (2 * drawn - 1)).exp())


def _row_uniforms(x: Tensor, generator: Generator) -> Tensor:
    """A uniform number for each row, (B, 1, ..., 1)."""
    return uniforms((len(x), 1), x, generator).reshape(-1, *[1] * (x.ndim - 1))


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_t: Tensor, owner: CompiledEnergy, level: AnyLevel, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_t)
        ctx.owner, ctx.level, ctx.parameters = owner, level, parameters
        ctx.keys = current_keys(owner.network) if owner.drops else None
        kind = x_t.device.type
        ctx.low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return owner.value(x_t, level)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Any, ...]:
        (x_t,) = ctx.saved_tensors
        low: Any = contextlib.nullcontext()
        if ctx.low is not None:
            low = torch.autocast(x_t.device.type, ctx.low)
        trained = [p for p in ctx.parameters if p.requires_grad]
        with torch.enable_grad(), dropout_keys(ctx.owner.network, ctx.keys), low:
            each = iter(ctx.owner.weight_gradients(x_t, u, ctx.level, trained))
        return None, None, None, *[next(each) if p.requires_grad else None for p in ctx.parameters]


class CompiledEnergy:
    """The denoiser of an energy network through torch.compile, trainable."""

    def __init__(
        self, denoiser: EnergyDenoiser, network: nn.Module, *, backend: str = "inductor"
    ) -> None:
        self.denoiser, self.network, self.drops = denoiser, network, uses_dropout(network)
        weights = list(network.parameters())
        small = sum(weight.numel() for weight in weights) < SMALL
        self.graphs = backend == "inductor" and small and all(weight.is_cuda for weight in weights)

        def gradient(x_t: Tensor, level: AnyLevel) -> Tensor:
            return torch.func.grad(lambda x: denoiser.call(x, level).sum())(x_t)

        def slope(x_t: Tensor, u: Tensor, level: AnyLevel) -> Tensor:
            return torch.func.jvp(lambda x: denoiser.call(x, level).sum(), (x_t,), (u,))[1]

        load_forward_mode()
        # Shapes as they are: dynamic ones fail inside these transforms.
        options: dict[str, Any] | None = {"triton.cudagraphs": True} if self.graphs else None
        self.gradient = torch.compile(gradient, backend=backend, dynamic=False, options=options)
        self.slope = torch.compile(slope, backend=backend, dynamic=False, options=options)

    def __call__(self, x_t: Tensor, level: AnyLevel, /) -> Tensor:
        gradient = _Gradient.apply(x_t, self, level, *self.network.parameters())
        return (x_t - level.sigma**2 * gradient) / level.alpha

    def value(self, x_t: Tensor, level: AnyLevel) -> Tensor:
        """grad f(x_t)."""
        with torch.no_grad():
            try:
                return self._kept(self.gradient(x_t, level))
            except Exception as error:
                raise_unless_compiler(error)
                self.gradient = self._plain_gradient
                return self.gradient(x_t, level)

    def weight_gradients(
        self, x_t: Tensor, u: Tensor, level: AnyLevel, weights: list[Tensor]
    ) -> tuple[Any, ...]:
        """The gradients of u' grad f(x_t) in the weights."""
        try:
            gradients = torch.autograd.grad(self.slope(x_t, u, level), weights, allow_unused=True)
            return tuple(None if g is None else self._kept(g) for g in gradients)
        except Exception as error:
            raise_unless_compiler(error)
            self.slope = lambda x_t, u, level: (u * self._plain_gradient(x_t, level)).sum()
            return torch.autograd.grad(self.slope(x_t, u, level), weights, allow_unused=True)

    def _kept(self, result: Tensor) -> Tensor:
        return result.clone() if self.graphs else result

    def _plain_gradient(self, x_t: Tensor, level: AnyLevel) -> Tensor:
        return (x_t - level.alpha * self.denoiser(x_t, level)) / level.sigma**2
