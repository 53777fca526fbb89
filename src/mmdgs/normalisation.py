"""Group norm (Wu and He, 2018) written out in plain operations, for compilers and for derivatives of any order.

    y = x - c,    out = (y - m) / sqrt(mean(y^2) - m^2 + eps) * weight + bias,    m = mean(y)

Any constant c gives the same result and the same derivatives. It is the mean of a group over the first line of pixels:
the square of its distance from the mean of all H lines is at most H times the variance, so few digits are lost, however
far from zero the numbers are; and all sums are then made in one pass over the image, as over a derivative's argument.
Sums go over the pixels of a channel first and then over the channels of a group: fast in either layout of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch's function of the same name: x (B, C, ...), sums in float32 at least, and put out in it."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    pixels = list(range(2, x.ndim))
    image = (*x.shape[:2], *[1] * len(pixels))

    def group_mean(values: Tensor) -> Tensor:
        channels = (values.mean(pixels) if pixels else values).unflatten(1, (num_groups, -1))
        return channels.mean(2, keepdim=True).expand_as(channels).reshape(image)

    line = precise[:, :, :1] if pixels else precise
    y = precise - group_mean(line).detach()
    m = group_mean(y)
    scale = (group_mean(y.square()) - m.square() + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.reshape(1, *image[1:])
    out = (y - m) * scale
    return out if bias is None else out + bias.reshape(1, *image[1:])


_plain: ContextVar[bool] = ContextVar("mmdgs_plain_norms", default=False)


@contextlib.contextmanager
def plain_norms() -> Iterator[None]:
    """Inside: our networks use torch's group norm, wherever they would write it out by themselves."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def want_plain_norms() -> bool:
    return _plain.get()


class WrittenOut(TorchFunctionMode):
    """Inside: every network's group norm is the one above."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.group_norm:
            return group_norm(*args, **(kwargs or {}))
        if func is torch.group_norm:  # has one argument more, which asks for cuDNN
            return group_norm(*args[:5], **{key: value for key, value in (kwargs or {}).items() if key in ("eps",)})
        return func(*args, **(kwargs or {}))
