"""Layers with derivatives by hand, where torch's own are slow or missing.

**Group norm written out** (Wu and He, 2018), for compilers and for derivatives of any order:

    y = x - c,    out = (y - m) / sqrt(mean(y^2) - m^2 + eps) * weight + bias,    m = mean(y)

Any constant c gives the same result. It is the mean of a group over the first line of pixels: the
square of its distance from the mean of all H lines is at most H times the variance, so few digits
are lost; and all sums are made in one pass, over the pixels of a channel first and then over the
channels of a group: fast in either layout of memory.

**Second derivatives of frozen layers**, for products with the Hessian of an energy on a CPU.
Autograd takes the gradient of the weights along, and dozens of operations for a norm. By hand, with
u the vector that comes in and y = weight g, per group of a norm,

    convolution   the backward pass is a transposed convolution, whose own is a convolution
    group norm    B = r P y      ->  weight r P u in g,       -r (q z + b r P u + a B) in x
                  P = I - 11'/n - z z'/n,  z = r (x - mean),  a = <z u>,  b = <z y>,  q = <u B>

The probe diagonal of the MNIST energy takes 0.60 of autograd's time (one CPU thread, 4 probes).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


@cache
def load_forward_mode() -> None:
    """Have torch load its forward mode, whose first use warns of torch's own TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch's function of the same name: x (B, C, ...), sums in float32 at least."""
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


class WrittenOutNorms(TorchFunctionMode):
    """Inside: every network's group norm is the one above."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.group_norm:
            return group_norm(*args, **kwargs)
        if func is torch.group_norm:  # has one argument more, which asks for cuDNN
            return group_norm(*args[:5], **{k: v for k, v in kwargs.items() if k == "eps"})
        return func(*args, **kwargs)


def output_padding(
    x: Tensor, grad: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> list[int]:
    """What a transposed convolution must add to come back to the size of x after strides."""
    sizes = zip(
        x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    )
    return [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        weight = weight.contiguous(memory_format=_layout(x))  # else it is copied so each time
        stride, padding, dilation, groups = options
        sides = zip(dilation, weight.shape[2:], padding, strict=True)
        ctx.reach = [d * (k - 1) - p for d, k, p in sides]
        ctx.plainly = set(stride) == {1} and groups == 1 and min(ctx.reach) >= 0
        turned = weight
        if ctx.plainly:
            turned = weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=_layout(x))
        ctx.save_for_backward(weight, turned)
        ctx.options, ctx.like = options, x.new_empty(()).expand(x.shape)
        return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ConvolutionGrad.apply(grad, *ctx.saved_tensors, ctx), *[None] * 6


class _ConvolutionGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor, turned: Tensor, of: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.options = stride, padding, dilation, groups = of.options
        if of.plainly:  # a convolution with the weights turned around, at which CPUs are far faster
            plain = (stride, of.reach, dilation, False, [0, 0], groups)
            return aten.convolution(grad, turned, None, *plain)
        rest = output_padding(of.like, grad, weight, stride, padding, dilation)
        return aten.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        stride, padding, dilation, groups = ctx.options
        plain = (stride, padding, dilation, False, [0, 0], groups)
        return aten.convolution(u, *ctx.saved_tensors, None, *plain), None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
        sizes = (*x.shape[:2], x[0, 0].numel())
        out, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, groups, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        once = _NormGrad.apply if torch.is_grad_enabled() else _norm_backward
        return once(grad, *ctx.saved_tensors), None, None, None, None


class _NormGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
    ) -> Tensor:
        first = _norm_backward(grad, x, mean, rstd, weight)
        z = (x - _spread(mean, x)) * _spread(rstd, x)
        y = grad if weight is None else grad * _channels(weight, x)
        ctx.save_for_backward(x, mean, rstd, weight, z, first, _mean_product(z, y, mean))
        return first

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        x, mean, rstd, weight, z, first, b = ctx.saved_tensors
        pulled = _norm_backward(u, x, mean, rstd, None)
        a, q = _mean_product(z, u, mean), _mean_product(first, u, mean)
        in_x = _spread(-rstd * q, x) * z
        in_x = in_x.addcmul_(_spread(-rstd * b, x), pulled).addcmul_(_spread(-rstd * a, x), first)
        return pulled if weight is None else pulled * _channels(weight, x), in_x, None, None, None


def _norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> Tensor:
    """r P (weight grad)."""
    grad = grad.contiguous(memory_format=_layout(x))
    sizes, mask = (*x.shape[:2], x[0, 0].numel(), mean.shape[1]), [True, False, False]
    return aten.native_group_norm_backward(grad, x, mean, rstd, weight, *sizes, mask)[0]


def _layout(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Values of groups (B, groups) for the channels of x, (B, C, 1, ...)."""
    channels = values.repeat_interleave(x.shape[1] // values.shape[1], 1)
    return channels.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def _channels(weight: Tensor, x: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (x.ndim - 2))


def _mean_product(x: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """The mean of x y over each group, (B, groups)."""
    channels = (x * y).mean(list(range(2, x.ndim))) if x.ndim > 2 else x * y
    return channels.unflatten(1, (mean.shape[1], -1)).mean(2)


class SecondOrder(TorchFunctionMode):
    """Inside: convolutions and group norms of frozen networks are those above."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and len(args) == 7 and not kwargs and _served(*args[:3]):
            options = args[3:6]  # stride, padding, dilation: numbers, or words such as "same"
            if not any(isinstance(option, str) for option in options):
                pairs = [[o, o] if isinstance(o, int) else list(o) for o in options]
                return _Convolution.apply(*args[:3], *pairs, args[6])
        if func is functional.group_norm:
            bound = _GROUP_NORM.bind(*args, **kwargs)
            bound.apply_defaults()
            x, groups, weight, bias, eps = bound.args
            if _served(x, weight, bias):
                x = x.contiguous(memory_format=_layout(x))
                return _Norm.apply(x, groups, weight, bias, eps)
        return func(*args, **kwargs)


_GROUP_NORM = inspect.signature(functional.group_norm)


def _served(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether an argument is to be differentiated and no weight is."""
    frozen = not any(weight is not None and weight.requires_grad for weight in weights)
    return x.requires_grad and frozen and not torch.is_autocast_enabled(x.device.type)
