"""A tiny network in place of Inception: six known features of an image, as a TorchScript file."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mmdgs.metrics.inception import CLASSES, prepared
from mmdgs.metrics.inception_file import Standard, probe_image
from mmdgs.randomness import seeded

FEATURES = 6
PNG_KINDS = {1: 0, 2: 4, 3: 2, 4: 6}
"""Channels of a PNG, and what it calls them: grey, grey and alpha, colours, colours and alpha."""


def deep_png(levels: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel from levels (H, W, C), which Pillow does not write in colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, channels = levels.shape
    head = struct.pack(">2I5B", width, height, 16, PNG_KINDS[channels], 0, 0, 0)
    rows = b"".join(_filtered(levels.astype(">u2")))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _filtered(levels: np.ndarray) -> list[bytes]:
    """Rows of bytes after the number of their filter: every other as differences to its left."""
    rows = []
    step = 2 * levels.shape[2]
    for i, line in enumerate(levels):
        values = np.frombuffer(line.tobytes(), np.uint8)
        shifted = np.concatenate([np.zeros(step, np.uint8), values[:-step]])
        rows.append(b"\1" + (values - shifted).tobytes() if i % 2 else b"\0" + values.tobytes())
    return rows


def deep_tiff(
    levels: np.ndarray, order: str = "<", *, photometric: int | None = None, bits: int | None = None
) -> bytes:
    """An uncompressed TIFF from levels (H, W, C) of any numbers, in a byte order."""
    height, width, channels = levels.shape
    data = levels.astype(levels.dtype.newbyteorder(order)).tobytes()
    shown = (2 if channels > 2 else 1) if photometric is None else photometric
    kind = {"u": 1, "i": 2, "f": 3}[levels.dtype.kind]
    tags: list[tuple[int, str, list[int]]] = [
        (256, "H", [width]), (257, "H", [height]),
        (258, "H", [bits or 8 * levels.itemsize] * channels),
        (259, "H", [1]), (262, "H", [shown]), (273, "I", [8]), (277, "H", [channels]),
        (278, "H", [height]),
        (279, "I", [len(data)]), (284, "H", [1]), (339, "H", [kind] * channels),
    ]  # fmt: skip
    if channels in (2, 4):
        tags.insert(-1, (338, "H", [2]))  # an alpha that colours are not multiplied by
    place = 8 + len(data)
    entries, beyond = b"", b""
    for tag, form, values in tags:
        packed = struct.pack(f"{order}{len(values)}{form}", *values)
        if len(packed) > 4:
            there = place + 2 + 12 * len(tags) + 4 + len(beyond)
            beyond, packed = beyond + packed, struct.pack(f"{order}I", there)
        entries += struct.pack(
            f"{order}HHI", tag, 3 if form == "H" else 4, len(values)
        ) + packed.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", place)
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + beyond


class Fake(nn.Module):
    """Mean of each channel and of its square, of prepared images."""

    def __init__(self, scale: float = 1.0, *, head: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        if head:
            self.register_buffer("output", torch.randn(CLASSES, FEATURES, generator=seeded(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], 1)


def fake_known() -> Standard:
    """`Fake` as the standard network, with what it gives for the probe image."""
    values = Fake()(prepared(probe_image()))[0].tolist()
    return Standard(Fake, FEATURES, 1, tuple(values), 0.01)


def fake_script(file: Path, scale: float = 1.0, *, head: bool = False) -> Path:
    """The fake network as a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Fake(scale, head=head)).save(str(file))
    return file
