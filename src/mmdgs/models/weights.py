"""The weights of a model's folder: one file of safetensors, or several with an index (the hub's convention).

    model.safetensors                                  all of them, or
    model-00001-of-00003.safetensors ...               shards, and
    model.safetensors.index.json                       which tensor is in which: {"weight_map": {tensor: file}}

Where both are there the one file counts: shards are written first and the one file removed last, so that a write that
is cut short leaves the weights that were there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mmdgs.errors import UsageError, shown
from mmdgs.files import read_json, read_tensors, tensors_opened, tensors_to_bytes, to_json, write_atomically

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_NAME = 255
"""Bytes of a file's name; systems refuse longer ones with errors of their own."""
SHARDS = "model-*-of-*.safetensors"
PATTERN = "model{suffix}.safetensors"
MEGABYTE = 1_000_000


def write_weights(
    folder: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, shard_mb: float | None = None
) -> list[Path]:
    """Write tensors (floating-point ones in `dtype` if given) into a folder; returns the files, with their index.

    They are in one file, unless they are larger than `shard_mb` million bytes: then in shards no larger than that.
    """
    stored = {
        key: value.detach().to("cpu", dtype if value.is_floating_point() else None) for key, value in tensors.items()
    }
    parts = {WEIGHTS: list(stored)} if shard_mb is None else _shards(stored, shard_mb)
    for name, keys in parts.items():
        write_atomically(folder / name, tensors_to_bytes({key: stored[key] for key in keys}))
    if len(parts) > 1:
        total = sum(value.nbytes for value in stored.values())
        places = {key: name for name, keys in parts.items() for key in keys}
        write_atomically(folder / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": places}))
    return [folder / name for name in parts] + ([folder / INDEX] if len(parts) > 1 else [])


def _shards(tensors: Mapping[str, Tensor], shard_mb: float) -> dict[str, list[str]]:
    """Which tensors go into which file."""
    from huggingface_hub import split_torch_state_dict_into_shards

    if not 0 < shard_mb < math.inf:
        raise UsageError(f"shards must have a positive number of megabytes, got {shard_mb}")
    most = int(shard_mb * MEGABYTE)
    largest = max(tensors, key=lambda key: tensors[key].nbytes)
    if tensors[largest].nbytes > most:
        raise UsageError(
            f"the tensor {largest} alone has {tensors[largest].nbytes / MEGABYTE:.3g} million bytes, more than a shard "
            f"of {shard_mb:g}: give larger shards, or a smaller dtype"
        )
    found = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=PATTERN, max_shard_size=most)
    return found.filename_to_tensors


def remove_weights(folder: Path, *, keep: set[str] | None = None) -> None:
    """Remove weights of earlier writes, all but the files to keep."""
    for path in [folder / INDEX, *folder.glob(SHARDS), folder / WEIGHTS]:
        if path.name not in (keep or set()):
            path.unlink(missing_ok=True)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a folder, from one file or from shards, and the file that stands for them in messages."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return read_tensors(folder / WEIGHTS), folder / WEIGHTS
    index = folder / INDEX
    places = _weight_map(index)
    files = list(dict.fromkeys(places.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder} lacks the shard {missing[0]} ({len(missing)} of {len(files)} are missing), which {INDEX} names: "
            "copy all of the folder's files"
        )
    found: dict[str, Tensor] = {}
    for name in files:
        held = read_tensors(folder / name)
        wanted = {key for key, place in places.items() if place == name}
        if held.keys() != wanted:
            other = min(held.keys() ^ wanted)
            said = "lacks" if other in wanted else "holds"
            raise UsageError(
                f"{folder / name} {said} the tensor {other}, which {INDEX} says otherwise: they are of two models"
            )
        found |= held
    return found, index


def _weight_map(index: Path) -> dict[str, str]:
    """Which tensor is in which file of the same folder, checked."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UsageError(f"{index} has no weight_map from tensors to files")
    for name in places.values():
        # A name alone: an index must not lead out of its folder.
        known = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        if not known or len(name.encode()) > LONGEST_NAME:
            raise UsageError(f"{index} names {shown(name)}, expected a safetensors file of the same folder")
    return places


def load_weights(
    network: nn.Module, tensors: Mapping[str, Tensor], where: object, *, than: str = "its configuration says"
) -> None:
    """Copy tensors into a network, refusing those of another architecture or with values that are not finite."""
    wanted = network.state_dict()
    missing, foreign = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{key} is {tuple(tensors[key].shape)}, expected {tuple(wanted[key].shape)}"
        for key in wanted
        if key in tensors and tensors[key].shape != wanted[key].shape
    ]
    if missing or foreign or shapes:
        said = [f"{len(missing)} missing (such as {missing[0]})"] if missing else []
        said += [f"{len(foreign)} unknown (such as {foreign[0]})"] if foreign else []
        said += [f"{len(shapes)} of another shape ({shapes[0]})"] if shapes else []
        raise UsageError(f"{where} is from another architecture than {than}: tensors {', '.join(said)}")
    check_finite(tensors, where)
    network.load_state_dict(dict(tensors))


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Refuse weights that are NaN or infinite."""
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise UsageError(f"{where} holds values that are not finite, in {bad[0]}")


def weights_digest(tensors: Mapping[str, Tensor], where: object) -> str:
    """SHA-256 of tensors with their names, shapes and types, in the order of the names."""
    if not tensors:
        raise UsageError(f"{where} holds no weights, so there is no digest to know it by; do not keep results of it")
    found = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def counts_in(file: Path) -> dict[str, int]:
    """How many numbers each tensor of a safetensors file has, by its header."""
    with tensors_opened(file) as stored:
        return {key: math.prod(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118  no mapping
