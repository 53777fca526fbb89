"""Layers of frozen networks whose backward pass is itself differentiated: products with the Hessian of an energy.

Autograd can do this by itself, but spends half the time on what nobody asked for: torch's second derivative of a
convolution takes the gradient of its weights along, and those of a norm and of SiLU are dozens of small operations.
Written by hand, with u the vector that comes in and y = weight g, per group of a norm,

    convolution   the backward pass is a transposed convolution, whose own backward pass is a convolution
    SiLU          g s'(x)        ->  u s'(x) in g,            u g s''(x) in x
    group norm    B = r P y      ->  weight r P u in g,       -r (q z + b r P u + a B) in x
                  P = I - 11'/n - z z'/n,    z = r (x - mean),    a = mean(z u),    b = mean(z y),    q = mean(u B)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


def output_padding(
    x: Tensor, grad: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """What a transposed convolution must add to come back to the size of x, where strides have cut something off."""
    return [
        x.shape[2 + i] - ((grad.shape[2 + i] - 1) * s - 2 * p + d * (weight.shape[2 + i] - 1) + 1)
        for i, (s, p, d) in enumerate(zip(stride, padding, dilation, strict=True))
    ]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        weight = weight.contiguous(memory_format=_layout(x))  # else it is copied so each time
        stride, padding, dilation, groups = options
        ctx.reach = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=True)]
        ctx.plainly = set(stride) == {1} and groups == 1 and min(ctx.reach) >= 0
        turned = weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=_layout(x)) if ctx.plainly else weight
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
            return aten.convolution(grad, turned, None, stride, of.reach, dilation, False, [0, 0], groups)
        rest = output_padding(of.like, grad, weight, stride, padding, dilation)
        return aten.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        stride, padding, dilation, groups = ctx.options
        found = aten.convolution(u, *ctx.saved_tensors, None, stride, padding, dilation, False, [0, 0], groups)
        return found, None, None, None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _SiluGrad.apply(grad, x) if torch.is_grad_enabled() else aten.silu_backward(grad, x)


class _SiluGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        s = x.sigmoid()
        ctx.save_for_backward(x, grad * (s * (1 - s) * (2 + x * (1 - 2 * s))))
        return aten.silu_backward(grad, x)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        x, curved = ctx.saved_tensors
        return aten.silu_backward(u, x), u * curved


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        rows, channels = x.shape[:2]
        out, mean, rstd = aten.native_group_norm(x, weight, bias, rows, channels, x[0, 0].numel(), groups, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        once = _NormGrad.apply if torch.is_grad_enabled() else _norm_backward
        return once(grad, *ctx.saved_tensors), None, None, None, None


class _NormGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        found = _norm_backward(grad, x, mean, rstd, weight)
        z = (x - _spread(mean, x)) * _spread(rstd, x)
        y = grad if weight is None else grad * _channels(weight, x)
        ctx.save_for_backward(x, mean, rstd, weight, z, found, _mean_product(z, y, mean))
        return found

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        x, mean, rstd, weight, z, found, b = ctx.saved_tensors
        pulled = _norm_backward(u, x, mean, rstd, None)
        a, q = _mean_product(z, u, mean), _mean_product(found, u, mean)
        in_x = _spread(-rstd * q, x) * z
        in_x = in_x.addcmul_(_spread(-rstd * b, x), pulled).addcmul_(_spread(-rstd * a, x), found)
        return pulled if weight is None else pulled * _channels(weight, x), in_x, None, None, None


def _norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """r P (weight grad)."""
    grad = grad.contiguous(memory_format=_layout(x))
    sizes = (*x.shape[:2], x[0, 0].numel(), mean.shape[1])
    return aten.native_group_norm_backward(grad, x, mean, rstd, weight, *sizes, [True, False, False])[0]


def _layout(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Values of groups (B, groups) for the channels of x, (B, C, 1, ...)."""
    return values.repeat_interleave(x.shape[1] // values.shape[1], 1).reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def _channels(weight: Tensor, x: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (x.ndim - 2))


def _mean_product(x: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """The mean of x y over each group, (B, groups)."""
    channels = (x * y).mean(list(range(2, x.ndim))) if x.ndim > 2 else x * y
    return channels.unflatten(1, (mean.shape[1], -1)).mean(2)


class SecondOrder(TorchFunctionMode):
    """Inside: convolutions, group norms and SiLU of frozen networks are those above."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and len(args) == 7 and not kwargs and _served(args[:3]):
            stride, padding, dilation = (_pair(option) for option in args[3:6])
            if None not in (stride, padding, dilation):
                return _Convolution.apply(*args[:3], stride, padding, dilation, args[6])
        if func is functional.group_norm:
            x, groups, weight, bias, eps = _norm_arguments(*args, **kwargs)
            if _served([x, weight, bias]):
                return _Norm.apply(x.contiguous(memory_format=_layout(x)), groups, weight, bias, eps)
        if func is functional.silu and len(args) == 1 and not kwargs.get("inplace") and _served(args):
            return _Silu.apply(args[0])
        return func(*args, **kwargs)


def _norm_arguments(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, int, Tensor | None, Tensor | None, float]:
    """The arguments of torch's group norm, by whatever names they came."""
    return input, num_groups, weight, bias, eps


def _served(tensors: Sequence[Tensor | None]) -> bool:
    """Whether an argument, the first, is to be differentiated and no weight is."""
    x, *weights = tensors
    frozen = not any(weight is not None and weight.requires_grad for weight in weights)
    return x is not None and x.requires_grad and frozen and not torch.is_autocast_enabled(x.device.type)


def _pair(option: Any) -> list[int] | None:
    """A convolution's option for both directions; None where it is a word, such as "same"."""
    if isinstance(option, str):
        return None
    return [option, option] if isinstance(option, int) else list(option)
