"""Models written anew: pickles as safetensors (`convert`), smaller weights or files (`export`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from mmdgs import files
from mmdgs.errors import UsageError, unknown_name
from mmdgs.models import diffusers
from mmdgs.models.card import LICENCE
from mmdgs.models.loading import CHECKPOINTS, load
from mmdgs.models.ncsnv2 import read_ncsnv2
from mmdgs.models.weights import CARD, CONFIG, FIT_FILES, INDEX, SHARDS, WEIGHTS
from mmdgs.pickled import named_tensors, read_checkpoint

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""What weights are stored in. Not in float16: its range is too small for some of them."""
STORAGE = "\n## Storage\n"
THEIRS = f"{diffusers.WEIGHTS}*.safetensors"
OWN = (
    CONFIG, CARD, WEIGHTS, INDEX, SHARDS, *FIT_FILES, diffusers.INDEX, diffusers.SCHEDULER, THEIRS
)  # fmt: skip
"""What a model's folder holds and may be replaced; fits are variances of the old weights."""


def convert_checkpoint(
    source: Path, out: Path, *, ema: bool = True, size: int | None = None, overwrite: bool = False
) -> Path:
    """Write a pickle as a folder of safetensors and JSON, whole or not at all.

    An NCSNv2 checkpoint becomes a model of mmdgs (its moving average, or with ema=False its raw
    weights); a folder of diffusers becomes the same folder with safetensors in the pickle's place.
    """
    _refuse_other(out, overwrite)
    if source.is_dir():
        if not ema or size is not None:
            option = "--size" if ema else "--raw"
            raise UsageError(f"{option} is for an NCSNv2 checkpoint, and {source} is a folder")
        return _convert_pipeline(source, out)
    if not source.is_file() or source.suffix not in CHECKPOINTS:
        raise UsageError(
            f"{source} is nothing to convert: expected an NCSNv2 checkpoint "
            f"({', '.join(CHECKPOINTS)}), or a folder of diffusers with {diffusers.WEIGHTS}.bin"
        )
    model = read_ncsnv2(source, ema=ema, size=size)
    weights = "the moving average of the weights" if ema else "the raw weights"
    card = model.describe().replace(LICENCE, "")  # the weights are somebody else's
    card += f"\n## Origin\n\nConverted from `{source.name}` by `mmdgs convert`: {weights}."
    with _new_folder(out) as folder:
        model.save_pretrained(folder, card=f"{card} Its licence holds here too.\n")
    return out


def _convert_pipeline(source: Path, out: Path) -> Path:
    """The same folder, its network's pickle as safetensors; loaded once before it gets its name."""
    if source.resolve() == out.resolve():
        raise UsageError(f"the output {out} is the source itself; give another folder")
    network = diffusers.network_folder(source) or source
    for pattern in (THEIRS, WEIGHTS, SHARDS):
        for file in network.glob(pattern):
            raise UsageError(
                f"nothing needs converting: the weights in {source} are safetensors already "
                f"({file.name}); use the folder as it is, for example: mmdgs sample {source}"
            )
    pickle = network / f"{diffusers.WEIGHTS}.bin"
    if not pickle.is_file():
        raise UsageError(
            f"there is no {pickle.name} to convert in {source}, nor in its folder unet"
        )
    tensors = named_tensors(read_checkpoint(pickle), pickle)
    with _new_folder(out) as folder:
        for file in source.rglob("*.json"):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(copy, files.read_file(file))
        content = files.tensors_to_bytes({key: value.clone() for key, value in tensors.items()})
        weights = (folder / pickle.relative_to(source)).with_suffix(".safetensors")
        files.write_atomically(weights, content)
        diffusers.read_pipeline(folder, str(source))
    return out


def export_model(
    source: str | Path,
    out: Path,
    *,
    dtype: str = "bf16",
    shard_mb: float | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write a model of mmdgs as a folder, whole or not at all; returns the files of its weights.

    Weights are rounded to `dtype`, and where they are larger than `shard_mb` million bytes they are
    in several files. A training run's model has its averaged weights, and so has what is exported.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    _refuse_other(out, overwrite)
    model = load(source)
    with _new_folder(out) as folder:
        model.save_pretrained(folder, dtype=DTYPES[dtype], shard_mb=shard_mb)
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        card, _, _ = (model.card or model.describe()).partition(STORAGE)
        many = "one file" if len(names) == 1 else f"{len(names)} files"
        text = f"{card.rstrip()}\n{STORAGE}\nWeights in {dtype}, in {many}, by `mmdgs export`.\n"
        (folder / CARD).write_text(text, encoding="utf-8")
    return [out.resolve() / name for name in names]


def _refuse_other(out: Path, overwrite: bool) -> None:
    """Refuse to replace a folder that holds anything else than a model's files, at any depth."""
    if files.holds_nothing(out, overwrite):
        return
    if not any((out / name).is_file() for name in (CONFIG, diffusers.INDEX)):
        raise UsageError(f"{out} holds other things than a model; choose another folder")
    for path in out.rglob("*"):
        end = path.is_symlink() or not path.is_dir() or not any(path.iterdir())
        if end and not any(path.match(pattern) for pattern in OWN):
            other = path.relative_to(out).parts[0]
            raise UsageError(
                f"{out} holds more than a model, such as {other}; choose another folder"
            )


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` when all is in it."""
    out = out.resolve()
    try:
        with files.new_folder(out.parent), files.folder_written_atomically(out) as folder:
            yield folder
    except OSError as error:
        raise UsageError(f"cannot write the folder {out}: {error.strerror or error}") from error
