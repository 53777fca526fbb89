"""Hadamard probes of a Jacobian's diagonal: the lattice's estimate with signs at every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mmdgs.moments.probes import MOST_CLASSES, Estimate, Products, Rademacher, pixel_classes
from mmdgs.randomness import Generator, signs, uniforms


@dataclass(frozen=True)
class Hadamard:
    """Signs at every pixel of an image (B, C, H, W) that cancel between classes of pixels.

    Probe s is  v_i = z_i H[s, class of i],  z random signs. Over all m rows  sum_s H[s, a] H[s, b]
    = 0  for classes a != b, so that only pixels of one class are left: the estimate is that of
    Lattice(smooth=False) with m classes, number for number. Orders are powers of 2: where S is
    none, S rows of the next order, drawn at random, leave the variance J_ji^2 (m - S) / (S (m - 1))
    of a pixel j of another class.
    """

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        order = min(1 << (count - 1).bit_length(), MOST_CLASSES)
        blocks = -(-count // order)
        z = signs((len(like), blocks, 1, *like.shape[1:]), like, generator)
        rows = uniforms((len(like), blocks, order), like, generator).argsort(2)
        place = pixel_classes(order, *like.shape[1:]).to(like.device)
        matrix = _hadamard(order).to(like.device, like.dtype)[:, place]  # (order, C, H, W)
        return (z * matrix[rows]).flatten(1, 2)[:, :count].transpose(0, 1)

    def estimate(self, parts: Products, count: int, like: Tensor) -> Estimate:
        return Rademacher().estimate(parts, count, like)


@cache
def _hadamard(order: int) -> Tensor:
    """Sylvester's Hadamard matrix (order, order), the order a power of 2."""
    if order == 1:
        return torch.ones(1, 1)
    half = _hadamard(order // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
