"""Old pickles to safetensors: an NCSNv2 checkpoint to a model's folder, a diffusers folder to one without pickles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import folder_written_atomically, holds_nothing, read_file, tensors_to_bytes, write_atomically
from mmdgs.models import CONFIG
from mmdgs.models.card import LICENCE
from mmdgs.pretrained import diffusion
from mmdgs.pretrained.loading import CHECKPOINTS
from mmdgs.pretrained.ncsnv2 import read_ncsnv2
from mmdgs.pretrained.pickles import read_pickle

MODELS = (CONFIG, diffusion.INDEX)
"""Files by which a folder is known as a model's, which may be replaced."""


def convert(source: Path, out: Path, *, ema: bool = True, size: int | None = None, overwrite: bool = False) -> Path:
    """Write a pickle as a folder of safetensors and JSON, whole or not at all.

    An NCSNv2 checkpoint becomes a model of mmdgs (its moving average, or with ema=False its raw weights); a folder
    of diffusers whose network is a pickle becomes the same folder with safetensors in its place.
    """
    _require_writable(out, overwrite)
    if source.is_dir():
        return _convert_pipeline(source, out)
    if not source.is_file() or source.suffix not in CHECKPOINTS:
        raise UsageError(
            f"{source} is nothing to convert: expected an NCSNv2 checkpoint ({', '.join(CHECKPOINTS)}), or a folder of "
            f"diffusers with {diffusion.WEIGHTS}.bin"
        )
    model = read_ncsnv2(source, ema=ema, size=size)
    weights = "the moving average of the weights" if ema else "the raw weights"
    card = model.describe().replace(LICENCE, "")  # the weights are somebody else's
    card += (
        f"\n## Origin\n\nConverted from `{source.name}` by `mmdgs convert`: {weights}. Its licence holds here too.\n"
    )
    with _new_folder(out) as folder:
        model.save_pretrained(folder, card=card)
    return out


def _require_writable(out: Path, overwrite: bool) -> None:
    """Refuse to write over anything, unless it is a model and that was asked for."""
    if holds_nothing(out, overwrite):
        return
    if not any((out / name).is_file() for name in MODELS):
        raise UsageError(f"{out} holds other things than a model, which are not overwritten; choose another folder")


def _new_folder(out: Path) -> AbstractContextManager[Path]:
    """A folder to write into that becomes `out` when all is in it."""
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out.parent}: {error.strerror or error}") from error
    return folder_written_atomically(out)


def _convert_pipeline(source: Path, out: Path) -> Path:
    """The same folder, its network's pickle as safetensors; loaded once before it gets its name."""
    if source.resolve() == out.resolve():
        raise UsageError(f"the output {out} is the source itself; give another folder")
    network = diffusion.network_folder(source)
    pickled = None if network is None else network / f"{diffusion.WEIGHTS}.bin"
    if network is None or pickled is None or not pickled.is_file():
        raise UsageError(f"there is no {diffusion.WEIGHTS}.bin to convert in {source}, nor in its folder unet")
    tensors = read_pickle(pickled)
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UsageError(f"{pickled} is no dictionary of tensors")
    with _new_folder(out) as folder:
        for file in source.rglob("*.json"):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, read_file(file))
        weights = folder / network.relative_to(source) / f"{diffusion.WEIGHTS}.safetensors"
        write_atomically(weights, tensors_to_bytes({key: value.clone() for key, value in tensors.items()}))
        diffusion.read_pipeline(folder, str(source))
    return out
