"""A model's folder written anew for keeping or sending: weights in fewer bytes, in files that are not too large."""

from __future__ import annotations

from pathlib import Path

import torch

from mmdgs.errors import UsageError
from mmdgs.files import folder_written_atomically, holds_nothing
from mmdgs.models import CARD, CONFIG, INDEX, SHARDS, WEIGHTS, load
from mmdgs.networks.registry import nearest

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""What weights are stored in. Not in float16: its range is too small for some of them."""
STORAGE = "\n## Storage\n"
OURS = (CONFIG, CARD, WEIGHTS, INDEX, SHARDS, "isotropic.json")
"""What a model's folder holds and may be replaced; the last are variances of the old weights."""


def export(
    source: str | Path, out: Path, *, dtype: str = "bf16", shard_mb: float | None = None, overwrite: bool = False
) -> list[Path]:
    """Write a model (whatever `mmdgs.load` takes) as a folder, whole or not at all; returns the files of its weights.

    Weights are rounded to `dtype`, and where they are larger than `shard_mb` million bytes they are in several files.
    A training run's model has its averaged weights, and so has what is exported.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; choose one of {', '.join(DTYPES)}")
    _require_writable(out, overwrite)
    model = load(source)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with folder_written_atomically(out) as folder:
            model.save_pretrained(folder, dtype=DTYPES[dtype], shard_mb=shard_mb)
            files = sorted(folder.glob("*.safetensors"))
            card, _, _ = (model.card or model.describe()).partition(STORAGE)
            many = "one file" if len(files) == 1 else f"{len(files)} files"
            text = f"{card.rstrip()}\n{STORAGE}\nWeights in {dtype}, in {many}, by `mmdgs export`.\n"
            (folder / CARD).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the folder {out}: {error.strerror or error}") from error
    return [out / path.name for path in files]


def _require_writable(out: Path, overwrite: bool) -> None:
    """Refuse to write over anything, unless it is a model alone (no training run) and that was asked for."""
    if holds_nothing(out, overwrite):
        return
    other = [path.name for path in out.iterdir() if not any(path.match(pattern) for pattern in OURS)]
    if other:
        raise UsageError(f"{out} holds more than a model (such as {other[0]}), which is not removed; choose another")
