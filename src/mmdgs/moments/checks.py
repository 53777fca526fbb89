"""Whether a function can be the denoiser that it is said to be: looked at with numbers that are there anyway.

With x_t = alpha x + sigma e, D the denoiser and J its Jacobian, over all numbers of a batch

    removed   S = mean (x_t - alpha D)^2 / sigma^2         about 1 minus what is left open
    open      T = alpha tr J / d                           between 0 and 1 on average over x_t
    risk      S + 2 T - 1 = mean (x - D)^2 alpha^2 / sigma^2     in expectation over e, for any function D
                                                           (Stein's unbiased estimate of the risk)

The first posterior of a denoiser at a level is looked at, and what is odd is logged, once a denoiser. Where clean x are
known, D must be nearer to them than x_t / alpha is. Points of few numbers may lie anywhere (between modes, on a grid,
at a chain's start), so S, T and the risk are asked of images alone.
"""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from mmdgs.noise import NoiseLevel, NoiseLevels

logger = logging.getLogger("mmdgs")

LARGE = 64
"""Numbers of an example from which S, T and the risk are looked at."""
MOST_REMOVED = 9.0
"""S above which it is odd: the mean is three times as far from x_t as the noise is."""
OPEN = (-0.25, 1.2)
"""T outside which it is odd."""
LEAST_RISK, NUMBERS = -0.25, 1024
"""The risk below which x_t holds less noise than the level says, and the numbers that it takes to tell."""
PIXELS = 10.0
"""From this root mean square on x_t looks like pixels from 0 to 255, where sigma is smaller."""
SAME = 0.02
"""How far two means of the same x_t may lie apart, relatively: bf16 rounds less."""
REPEATS, SAMPLED = 8, 64
"""Posteriors of a level that are compared with its first, by so many numbers."""
FARTHER, WORSE = 1.05, 1.5
"""How many times the squared error of x_t is refused, and that of a linear denoiser warned of."""
FEW = 8
"""Clean examples below which their variance is not known."""
MOST_LEVELS, DEPTH = 4096, 4
"""Levels that are remembered of a denoiser, and how deep networks are looked for in it."""

MISTAKES = (
    "does the network predict what its wrapper says (noise_denoiser, clean_denoiser, score_denoiser ...), was it "
    "trained at this sigma, and are the values in the range it was trained on?"
)


@dataclass
class _Looks:
    """What was seen of one denoiser: the first posterior at each level, and whether anything was logged."""

    logged: bool = False
    first: dict[NoiseLevel, tuple[Tensor, Tensor, tuple[int, ...]]] = field(default_factory=dict)
    repeats: dict[NoiseLevel, int] = field(default_factory=dict)


_looks: dict[int, _Looks] = {}
"""By the denoiser's id, as long as it lives."""


def _looks_at(denoiser: Any) -> _Looks | None:
    owner = denoiser.__self__ if isinstance(denoiser, MethodType) else denoiser
    if id(owner) not in _looks:
        try:
            weakref.finalize(owner, _looks.pop, id(owner), None).atexit = False
        except TypeError:  # it cannot be told when it is gone
            return None
        require_evaluation_mode(owner)
        _looks[id(owner)] = _Looks()
    return _looks[id(owner)]


def check_denoiser(
    denoiser: object, x_t: Tensor, level: NoiseLevel | NoiseLevels, mean: Tensor, slopes: Tensor | None = None
) -> None:
    """Look at a posterior's mean (B, ...) and, where it is known, the diagonal of J: once a denoiser and level."""
    if not isinstance(level, NoiseLevel) or mean.requires_grad or torch._C._functorch.maybe_current_level() is not None:
        return
    looks = _looks_at(denoiser)
    if looks is None or len(looks.repeats) > MOST_LEVELS:
        return
    if level in looks.repeats:
        _compare(looks, denoiser, x_t, level, mean)
        return
    looks.repeats[level] = REPEATS
    looks.first[level] = x_t.flatten()[:SAMPLED].clone(), mean.flatten()[:SAMPLED].clone(), _state(denoiser)
    if not looks.logged and (odd := _oddity(x_t, level, mean, slopes)) is not None:
        _log_once(denoiser, odd)


def _log_once(denoiser: object, sentence: str) -> None:
    looks = _looks_at(denoiser)
    if looks is not None and not looks.logged:
        looks.logged = True
        logger.warning("%s", sentence)


def _oddity(x_t: Tensor, level: NoiseLevel, mean: Tensor, slopes: Tensor | None) -> str | None:
    """One sentence on what cannot be expected of a denoiser, with the likely mistake."""
    size, gap = (one.double().square().mean().item() for one in (x_t, x_t - level.alpha * mean))
    d, removed = x_t[0].numel(), gap / level.sigma**2
    # x_t has the noise's size at least; much larger, the noise is lost in its rounding.
    if gap <= (8 * torch.finfo(x_t.dtype).eps) ** 2 * size and 1e-4 * size < level.sigma**2 < 4 * size:
        return f"the denoiser's mean at {level} is x_t itself: no noise is removed; is the network trained, and loaded?"
    if d < LARGE:
        return None
    if removed > MOST_REMOVED:
        pixels = size > max(PIXELS, level.sigma) ** 2
        return f"the denoiser moves x_t by {removed**0.5:.3g} times the noise at {level}: " + (
            f"x_t looks like pixels from 0 to 255 (root mean square {size**0.5:.3g}); divide them by 255 before noise "
            "is added"
            if pixels
            else MISTAKES
        )
    if slopes is None:
        return None
    low, high = ((level.alpha * end).item() for end in slopes.aminmax())
    still_open = level.alpha * slopes.double().mean().item()
    if low == high == 0 or (max(abs(low - 1), abs(high - 1)) < 1e-5 and removed > 0.01):
        return (
            f"the denoiser's Jacobian at {level} is {'zero' if high == 0 else 'that of x_t alone'}, though its mean "
            "changes: a part of the network is not differentiated (torch.no_grad, detach or rounding inside)"
        )
    if not OPEN[0] <= still_open <= OPEN[1]:
        return (
            f"the trace of the denoiser's Jacobian at {level} is {still_open:.3g} of the most it should be, d / alpha, "
            f"and lies between 0 and 1 for a denoiser: {MISTAKES}"
        )
    if x_t.numel() >= NUMBERS and removed + 2 * still_open - 1 < LEAST_RISK:
        return (
            f"x_t holds less noise than {level} says, as the denoiser sees it (it removes {removed**0.5:.3g} of it and "
            f"leaves {max(still_open, 0) ** 0.5:.3g} open): was noise added to x_t, and is sigma the one that the "
            "network was trained at?"
        )
    return None


def _compare(looks: _Looks, denoiser: object, x_t: Tensor, level: NoiseLevel, mean: Tensor) -> None:
    """Warn where an x_t that was seen before now has another mean, under the same weights."""
    if level not in looks.first:
        return
    before, first, state = looks.first[level]
    now, own = x_t.flatten()[:SAMPLED], mean.flatten()[:SAMPLED]
    looks.repeats[level] -= 1
    again = before.shape == now.shape and before.dtype == now.dtype and before.device == now.device
    again = again and torch.equal(before, now)
    if again or not looks.repeats[level]:
        del looks.first[level]
    moved = again and (own - first).double().norm().item() > SAME * first.double().norm().item()
    if moved and _state(denoiser) == state:
        sentence = (
            f"the denoiser gave two means for the same x_t at {level}: is something random in the network, such as "
            "dropout? Call network.eval() before"
        )
        _log_once(denoiser, sentence)


def _state(denoiser: object) -> tuple[int, ...]:
    """What changes with the weights of a denoiser's networks."""
    return tuple(
        number
        for network in networks_of(denoiser)
        for weights in network.parameters()
        for number in (weights.data_ptr(), weights._version)
    )


def check_errors(denoiser: object, level: NoiseLevel, errors: tuple[float, float], x: Tensor) -> None:
    """Warn, once a denoiser, where its means are far from clean x (N, ...): `errors` are those of D and x_t / alpha.

    They are mean squares. D must be nearer than x_t / alpha is, and nearer than a linear function of x_t with the mean
    and variance of the data would be.
    """
    error, noise = errors
    spread = x.double().var(0).mean().item() if len(x) >= FEW else math.inf
    linear = noise / (1 + noise / spread) if spread > 0 else 0.0
    if error > FARTHER * noise:
        _log_once(denoiser, farther(level, error, noise))
    elif error > WORSE * linear:
        _log_once(denoiser, farther(level, error, linear, "a linear function of x_t would be"))


def require_nearer(level: NoiseLevel, errors: tuple[float, float]) -> None:
    """Refuse means that are farther from clean data than x_t / alpha is, by the mean squares of both errors."""
    if errors[0] > FARTHER * errors[1]:
        raise ValueError(farther(level, *errors))


def farther(level: NoiseLevel, error: float, least: float, other: str = "the noisy data are") -> str:
    """The sentence on means that are farther from clean data than something else."""
    return (
        f"at {level} the denoiser's means are farther from the clean data than {other} (root mean square "
        f"{error**0.5:.3g} and {least**0.5:.3g}): {MISTAKES}"
    )


def require_evaluation_mode(denoiser: object) -> None:
    """Refuse a denoiser whose networks are in training mode, where they have layers that mind."""
    for network in networks_of(denoiser):
        for name, layer in network.named_modules():
            random = getattr(layer, "p", 0) > 0 if isinstance(layer, _DropoutNd) else isinstance(layer, _BatchNorm)
            if random and layer.training:
                raise ValueError(
                    f"the network is in training mode, and its {type(layer).__name__} {name!r} then makes a mean "
                    "depend on chance or on the other rows; call network.eval() before"
                )


def networks_of(function: object, depth: int = DEPTH) -> Iterator[nn.Module]:
    """The networks that a denoiser holds: as attributes, or in the closure or the globals of a function."""
    if isinstance(function, nn.Module):
        yield function
        return
    if isinstance(function, FunctionType):
        seen = inspect.getclosurevars(function)
        held = [*seen.nonlocals.values(), *seen.globals.values()]
    else:
        held = [getattr(function, name, None) for name in ("__self__", "func")] + [
            *getattr(function, "__dict__", {}).values()
        ]
    for value in held if depth else ():
        if callable(value) and not isinstance(value, type):
            yield from networks_of(value, depth - 1)
