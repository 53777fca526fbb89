"""The files of a model's folder, and its weights: one file, or shards with an index, as on the hub.

    config.json, README.md                     its configuration (models/config.py) and its card
    model.safetensors                          all weights, or
    model-00001-of-00003.safetensors ...       shards, and
    model.safetensors.index.json               where each is: {"weight_map": {tensor: file}}
    isotropic.safetensors ...                  what was fitted (models/fits.py)

Where both are there the one file counts: shards are written first and the one file removed last, so
that a write that is cut short leaves the weights that were there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mmdgs import files
from mmdgs.errors import UsageError, shown

CONFIG, CARD = "config.json", "README.md"
WEIGHTS, SHARDS = "model.safetensors", "model-*-of-*.safetensors"
INDEX = "model.safetensors.index.json"
ISOTROPIC, SPECTRAL, CALIBRATION = "isotropic", "spectral", "calibration"
FIT_FILES = tuple(f"{kind}.safetensors" for kind in (ISOTROPIC, SPECTRAL, f"{CALIBRATION}-*"))
LONGEST_NAME = 255
"""Bytes of a file's name; systems refuse longer ones with errors of their own."""
MEGABYTE = 1_000_000


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    shard_mb: float | None = None,
) -> list[Path]:
    """Write tensors (floating-point ones in `dtype` if given) into a folder; returns the files.

    They are in one file, unless they are larger than `shard_mb` million bytes: then in shards no
    larger than that, with their index.
    """
    stored = {
        key: value.detach().to("cpu", dtype if value.is_floating_point() else None)
        for key, value in tensors.items()
    }
    parts = {WEIGHTS: list(stored)} if shard_mb is None else _shards(stored, shard_mb)
    contents = {
        name: files.tensors_to_bytes({key: stored[key] for key in keys})
        for name, keys in parts.items()
    }
    if len(parts) > 1:
        total = sum(value.nbytes for value in stored.values())
        places = {key: name for name, keys in parts.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        contents[INDEX] = files.to_json(index)
    for name, content in contents.items():
        files.write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _shards(tensors: Mapping[str, Tensor], shard_mb: float) -> dict[str, list[str]]:
    """Which tensors go into which file."""
    from huggingface_hub import split_torch_state_dict_into_shards

    largest = max(tensors, key=lambda key: tensors[key].nbytes)
    size = tensors[largest].nbytes
    if not size <= shard_mb * MEGABYTE < math.inf:
        raise UsageError(
            f"shard_mb must be at least {size / MEGABYTE:.3g}, the million bytes of the tensor "
            f"{largest}, got {shard_mb:g}: give larger shards, or a smaller dtype"
        )
    split = split_torch_state_dict_into_shards(
        dict(tensors),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_mb * MEGABYTE),
    )
    return split.filename_to_tensors


def remove_weights(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Remove weights of earlier writes, all but the files to keep."""
    for path in [folder / INDEX, *folder.glob(SHARDS), folder / WEIGHTS]:
        if path.name not in keep:
            path.unlink(missing_ok=True)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a folder, and the file that stands for them in messages."""
    file, index = folder / WEIGHTS, folder / INDEX
    if file.is_file() or not index.is_file():
        return files.read_tensors(file), file
    places = _weight_map(index)
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(places.values()):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} lacks the shard {name}: copy all files that {INDEX} names")
        shard = files.read_tensors(folder / name)
        named = {key for key, place in places.items() if place == name}
        if shard.keys() != named:
            other = min(shard.keys() ^ named)
            verb = "lacks" if other in named else "holds"
            raise UsageError(
                f"{folder / name} {verb} the tensor {other}, which {INDEX} says otherwise: they "
                "are of two models"
            )
        tensors |= shard
    return tensors, index


def _weight_map(index: Path) -> dict[str, str]:
    """Which tensor is in which file of the same folder, checked."""
    places = files.read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UsageError(f"{index} has no weight_map from tensors to files")
    for name in places.values():
        # A name alone: an index must not lead out of its folder.
        plain = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        if not plain or len(name.encode()) > LONGEST_NAME:
            raise UsageError(
                f"{index} names {shown(name)}, expected a safetensors file of the same folder"
            )
    return places


def load_weights(
    network: nn.Module, tensors: Mapping[str, Tensor], where: object, than: str = "configured"
) -> None:
    """Copy tensors into a network; UsageError for another architecture or non-finite values."""
    own = network.state_dict()
    shapes = (
        f"{key} is {tuple(tensors[key].shape)}, expected {tuple(own[key].shape)}"
        for key in own
        if key in tensors and tensors[key].shape != own[key].shape
    )
    faults = {
        "missing": sorted(own.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - own.keys()),
        "of another shape": list(shapes),
    }
    if any(faults.values()):
        counts = (
            f"{len(keys)} {kind} (such as {keys[0]})" for kind, keys in faults.items() if keys
        )
        raise UsageError(
            f"{where} is from another architecture than {than}: tensors {', '.join(counts)}"
        )
    check_finite(tensors, where)
    network.load_state_dict(dict(tensors))


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Raise UsageError for weights that are NaN or infinite."""
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise UsageError(f"{where} holds values that are not finite, in {key}")


def weights_digest(tensors: Mapping[str, Tensor], where: object) -> str:
    """SHA-256 of tensors with their names, shapes and types, in the order of the names."""
    if not tensors:
        raise UsageError(f"{where} holds no weights to know it by; do not keep results of it")
    parts: list[bytes | memoryview] = []
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        parts.append(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        parts.append(value.reshape(-1).view(torch.uint8).numpy().data)
    return files.sha256_of(*parts)


def counts_in(file: Path) -> dict[str, int]:
    """How many numbers each tensor of a safetensors file has, by its header."""
    with files.tensors_opened(file) as stored:
        keys = stored.keys()
        return {key: math.prod(stored.get_slice(key).get_shape()) for key in keys}
