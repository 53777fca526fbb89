"""Whether a function can be the denoiser that it is said to be, from numbers that are there anyway.

With x_t = alpha x + sigma e, D the denoiser and J its Jacobian, over all numbers of a batch

    removed   S = mean (x_t - alpha D)^2 / sigma^2         about 1 minus what is left open
    open      T = alpha tr J / d                           between 0 and 1 on average over x_t
    risk      S + 2 T - 1 = mean (x - D)^2 alpha^2 / sigma^2     in expectation over e, for any D
                                                           (Stein's unbiased estimate of the risk)

The first posterior of a denoiser at a level is looked at, and what is odd is logged, once a
denoiser. Where clean x are known, D must be nearer to them than x_t / alpha is. Points of few
numbers may lie anywhere (between modes, at a chain's start), so S, T and the risk are asked of
images alone.
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

from mmdgs.noise import AnyLevel, NoiseLevel

logger = logging.getLogger("mmdgs")

LARGE = 64  # numbers of an example from which S, T and the risk are looked at
MOST_REMOVED = 9.0  # S above which it is odd: the mean is three times as far from x_t as the noise
OPEN = (-0.25, 1.2)  # T outside which it is odd
LEAST_RISK, NUMBERS = -0.25, 1024  # the risk below which x_t lacks noise, and numbers to tell by
PIXELS = 10.0  # the root mean square from which x_t looks like pixels from 0 to 255
SAME = 0.02  # how far two means of the same x_t may lie apart, relatively: bf16 rounds less
REPEATS, SAMPLED = 8, 64  # posteriors compared with a level's first, by so many numbers
FARTHER, WORSE = 1.05, 1.5  # times the squared error of x_t, and of a linear denoiser
FEW = 8  # clean examples below which their variance is not known
MOST_LEVELS, DEPTH = 4096, 4  # remembered of a denoiser; how deep networks are looked for in it
MISTAKES = (
    "does the network predict what its wrapper says (noise_denoiser, clean_denoiser, "
    "score_denoiser ...), was it trained at this sigma, and are the values in the range it was "
    "trained on?"
)


@dataclass
class _Looks:
    """What was seen of a denoiser: its first posterior at each level, and whether it was logged."""

    logged: bool = False
    first: dict[NoiseLevel, tuple[Tensor, Tensor, tuple[int, ...]]] = field(default_factory=dict)
    repeats: dict[NoiseLevel, int] = field(default_factory=dict)


_looks: dict[int, _Looks] = {}  # by the denoiser's id, as long as it lives


def _looks_at(denoiser: Any) -> _Looks | None:
    owner = denoiser.__self__ if isinstance(denoiser, MethodType) else denoiser
    if id(owner) not in _looks:
        try:
            weakref.finalize(owner, _looks.pop, id(owner), None).atexit = False
        except TypeError:  # it cannot be told when it is gone
            return None
        _require_evaluation_mode(owner)
        _looks[id(owner)] = _Looks()
    return _looks[id(owner)]


def check_denoiser(
    denoiser: object, x_t: Tensor, level: AnyLevel, mean: Tensor, slopes: Tensor | None = None
) -> None:
    """Look at a posterior's mean (B, ...), and the diagonal of J if known: once a level."""
    traced = torch._C._functorch.maybe_current_level() is not None
    if not isinstance(level, NoiseLevel) or mean.requires_grad or traced:
        return
    looks = _looks_at(denoiser)
    if looks is None or len(looks.repeats) > MOST_LEVELS:
        return
    if level in looks.repeats and level not in looks.first:
        return
    seen = x_t.flatten()[:SAMPLED], mean.flatten()[:SAMPLED]
    if level in looks.repeats:
        _compare(looks, denoiser, level, *seen)
        return
    looks.repeats[level] = REPEATS
    looks.first[level] = (seen[0].clone(), seen[1].clone(), _state(denoiser))
    if not looks.logged and (odd := _oddity(x_t, level, mean, slopes)) is not None:
        _log_once(denoiser, odd)


def _log_once(denoiser: object, sentence: str) -> None:
    looks = _looks_at(denoiser)
    if looks is not None and not looks.logged:
        looks.logged = True
        logger.warning("%s", sentence)


def _oddity(x_t: Tensor, level: NoiseLevel, mean: Tensor, slopes: Tensor | None) -> str | None:
    """One sentence on what cannot be expected of a denoiser, with the likely mistake."""
    size, gap = (x.double().square().mean().item() for x in (x_t, x_t - level.alpha * mean))
    removed, rounding = gap / level.sigma**2, (8 * torch.finfo(x_t.dtype).eps) ** 2 * size
    # x_t has the noise's size at least; much larger, the noise is lost in its rounding.
    if gap <= rounding and 1e-4 * size < level.sigma**2 < 4 * size:
        return f"the denoiser's mean at {level} is x_t itself: is the network trained, and loaded?"
    if x_t[0].numel() < LARGE:
        return None
    if removed > MOST_REMOVED:
        advice = MISTAKES
        if size > max(PIXELS, level.sigma) ** 2:
            advice = (
                f"x_t looks like pixels from 0 to 255 (root mean square {size**0.5:.3g}); divide "
                "them by 255 before noise is added"
            )
        return f"the denoiser moves x_t by {removed**0.5:.3g} times the noise at {level}: {advice}"
    if slopes is None:
        return None
    low, high = ((level.alpha * end).item() for end in slopes.aminmax())
    still_open = level.alpha * slopes.double().mean().item()
    if low == high == 0 or (max(abs(low - 1), abs(high - 1)) < 1e-5 and removed > 0.01):
        return (
            f"the denoiser's Jacobian at {level} is {'zero' if high == 0 else 'that of x_t'}, but "
            "its mean changes: a part of the network is not differentiated (no_grad, detach inside)"
        )
    if not OPEN[0] <= still_open <= OPEN[1]:
        return (
            f"the trace of the denoiser's Jacobian at {level} is {still_open:.3g} of the most it "
            f"should be, d / alpha, and lies between 0 and 1 for a denoiser: {MISTAKES}"
        )
    if x_t.numel() >= NUMBERS and removed + 2 * still_open - 1 < LEAST_RISK:
        return (
            f"x_t holds less noise than {level} says, as the denoiser sees it (it removes "
            f"{removed**0.5:.3g} of it and leaves {max(still_open, 0) ** 0.5:.3g} open): was noise "
            "added to x_t, and is sigma the one that the network was trained at?"
        )
    return None


def _compare(looks: _Looks, denoiser: object, level: NoiseLevel, x_t: Tensor, mean: Tensor) -> None:
    """Warn where an x_t that was seen before now has another mean, under the same weights."""
    before, first, state = looks.first[level]
    looks.repeats[level] -= 1
    same = before.shape == x_t.shape and before.dtype == x_t.dtype and before.device == x_t.device
    same = same and torch.equal(before, x_t)
    if same or not looks.repeats[level]:
        del looks.first[level]
    moved = same and (mean - first).double().norm().item() > SAME * first.double().norm().item()
    if moved and _state(denoiser) == state:
        _log_once(
            denoiser,
            f"the denoiser gave two means for the same x_t at {level}: is something random in the "
            "network, such as dropout? Call network.eval() before",
        )


def _state(denoiser: object) -> tuple[int, ...]:
    """What changes with the weights of a denoiser's networks."""
    weights = [w for network in networks_of(denoiser) for w in network.parameters()]
    return tuple(number for w in weights for number in (w.data_ptr(), w._version))


def check_errors(
    denoiser: object, level: NoiseLevel, errors: tuple[float, float], x: Tensor
) -> None:
    """Warn, once a denoiser, where D is far from clean x (N, ...).

    `errors` are the mean squares of D and of x_t / alpha. D must be nearer than x_t / alpha is, and
    than a linear function of x_t with the mean and variance of the data would be.
    """
    error, noise = errors
    spread = x.double().var(0).mean().item() if len(x) >= FEW else math.inf
    linear = noise / (1 + noise / spread) if spread > 0 else 0.0
    if error > FARTHER * noise:
        _log_once(denoiser, _farther(level, error, noise))
    elif error > WORSE * linear:
        _log_once(denoiser, _farther(level, error, linear, "a linear function of x_t would be"))


def require_nearer(level: NoiseLevel, errors: tuple[float, float]) -> None:
    """Refuse means that are farther from clean data than x_t / alpha is, by both mean squares."""
    if errors[0] > FARTHER * errors[1]:
        raise ValueError(_farther(level, *errors))


def _farther(
    level: NoiseLevel, error: float, least: float, other: str = "the noisy data are"
) -> str:
    return (
        f"at {level} the denoiser's means are farther from the clean data than {other} (root mean "
        f"square {error**0.5:.3g} and {least**0.5:.3g}): {MISTAKES}"
    )


def _require_evaluation_mode(denoiser: object) -> None:
    """Refuse a denoiser whose networks are in training mode, where they have layers that mind."""
    for network in networks_of(denoiser):
        for name, layer in network.named_modules():
            dropout = isinstance(layer, _DropoutNd) and layer.p > 0
            if layer.training and (dropout or isinstance(layer, _BatchNorm)):
                raise ValueError(
                    f"the network is in training mode: its {type(layer).__name__} {name!r} makes "
                    "means depend on chance or on the other rows; call network.eval() before"
                )


def networks_of(function: object, depth: int = DEPTH) -> Iterator[nn.Module]:
    """The networks that a denoiser holds: attributes, or a function's closure and globals."""
    if isinstance(function, nn.Module):
        yield function
        return
    if isinstance(function, FunctionType):
        seen = inspect.getclosurevars(function)
        held = [*seen.nonlocals.values(), *seen.globals.values()]
    else:
        held = [getattr(function, name, None) for name in ("__self__", "func")]
        held += getattr(function, "__dict__", {}).values()
    for value in held if depth else ():
        if callable(value) and not isinstance(value, type):
            yield from networks_of(value, depth - 1)
