"""load: whatever a network comes as, a model in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError, nearest
from mmdgs.files import read_json, read_text
from mmdgs.models import diffusers
from mmdgs.models.config import ModelConfig
from mmdgs.models.edm import from_edm
from mmdgs.models.fits import FIT_FILES
from mmdgs.models.model import CARD, CONFIG, Model
from mmdgs.models.ncsnv2 import read_ncsnv2
from mmdgs.models.shipped import shipped_folder, shipped_names
from mmdgs.models.weights import SHARDS, WEIGHTS, load_weights, read_weights
from mmdgs.networks.declared import parameters_as_in
from mmdgs.reading import reading

CHECKPOINTS = (".pth", ".pt", ".ckpt")


def load(
    source: str | Path | Model | Callable[..., Tensor] | Any,
    *,
    ema: bool = True,
    subfolder: str | None = None,
    size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """A model, from whatever it comes as.

    `source` is a model of mmdgs (a training run's folder, a model's folder, or a name that ships: "mnist"), an NCSNv2
    checkpoint (.pth: its moving average, or with ema=False its raw weights), a folder or pipeline of diffusers with a
    UNet2DModel, a folder of either kind on the Hugging Face hub ("owner/name", at a `revision`, with a `token`), an
    EDM-style network net(x, sigma) as a module, or a Model, which is returned as it is.

    `subfolder` is where in a folder to look. `size` is the side of the images, where the source does not say it:
    NCSNv2 networks take any and have 32 unless it is given (64 with the levels of the public CelebA checkpoint).
    Files are read to the CPU in float32 unless `device` and `dtype` say otherwise; a network that is given stays
    where and as it is.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise UsageError(f"size must be the side of the images in pixels, got {size!r}")
    if isinstance(source, str | Path):
        hub = {"revision": revision, "token": token}
        model = _from_name(str(source), ema, subfolder, size, hub)
    else:
        model = _from_object(source, size)
    if size is not None and model.param is not None and model.shape[1:] != (size, size):
        raise UsageError(f"{model.source} says itself that it gives {model.shape}; size is for models that do not")
    # Only what is asked for: diffusers warns of any dtype that is named, None too.
    wanted: dict[str, Any] = {
        name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None
    }
    if wanted:
        model.network.to(**wanted)
    return model


from_pretrained = load


def _from_object(source: Any, size: int | None) -> Model:
    """What is in memory already."""
    if isinstance(source, Model):
        return source
    if hasattr(source, "unet") and hasattr(source, "scheduler"):
        return diffusers.from_pipeline(source.unet, source.scheduler, type(source).__name__, size=size)
    if type(source).__name__ == diffusers.NETWORK:
        raise UsageError(
            f"a {diffusers.NETWORK} does not know its schedule: give the pipeline it is part of, or its folder"
        )
    if callable(source):
        return from_edm(source, size=size)
    raise UsageError(
        f"cannot make a model of a {type(source).__name__}: give a path, a name, a diffusers pipeline or a network"
    )


def _from_name(name: str, ema: bool, subfolder: str | None, size: int | None, hub: dict[str, Any]) -> Model:
    """What lies in files, here or on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in CHECKPOINTS:
            raise UsageError(
                f"{path} is no checkpoint that can be read: expected {', '.join(CHECKPOINTS)} (NCSNv2), or a folder; "
                "an EDM pickle holds code: load it with its own code and give the module"
            )
        return read_ncsnv2(path, name, ema=ema, size=size)
    if path.suffix in CHECKPOINTS and not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}")
    if not ema:
        raise UsageError(f"ema=False is for NCSNv2 checkpoints; {name!r} has one set of weights")
    if path.is_dir():
        return _from_folder(path / (subfolder or ""), name, size)
    return _from_folder(shipped_folder(name) or _fetched(name, subfolder or "", hub), name, size)


def _from_folder(folder: Path, source: str, size: int | None) -> Model:
    """A folder is a model of mmdgs, or diffusers': its configuration says which."""
    if _is_ours(folder):
        model = read_model(folder, source)
    elif diffusers.network_folder(folder) is None:
        raise UsageError(
            f"{folder} holds no model that is understood: expected {CONFIG} of mmdgs or of a {diffusers.NETWORK} in "
            "it or in its folder unet"
        )
    else:
        model = diffusers.read_pipeline(folder, source, size=size)
    model.folder = folder
    return model


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model of mmdgs, by its configuration."""
    return (folder / CONFIG).is_file() and "mmdgs_format" in read_json(folder / CONFIG)


def read_model(folder: Path, source: str) -> Model:
    """A model of mmdgs from its folder."""
    config = ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG)
    tensors, where = read_weights(folder)
    with reading(folder / CONFIG, "the configuration of a model"):
        with parameters_as_in({key: value.numel() for key, value in tensors.items()}, where):
            model = Model.build(config, source=source)
        load_weights(model.network, tensors, where)
    model.network.requires_grad_(False).eval()
    if (folder / CARD).is_file():
        model.card = read_text(folder / CARD)
    return model


def _fetched(name: str, subfolder: str, hub: dict[str, Any]) -> Path:
    """The folder of a repository of the hub: first what it says of itself, then the weights that are needed."""
    inner = f"{subfolder}/" if subfolder else ""
    folder = from_hub(name, ["*.json"], **hub) / subfolder
    if _is_ours(folder):
        from_hub(name, [inner + file for file in (CARD, WEIGHTS, SHARDS, *FIT_FILES)], **hub)
        return folder
    network = diffusers.network_folder(folder)
    if network is not None:
        inner += "unet/" if network != folder else ""
        from_hub(name, [f"{inner}{diffusers.WEIGHTS}*.safetensors"], **hub)
    return folder


def from_hub(name: str, files: Sequence[str], *, revision: str | None = None, token: str | None = None) -> Path:
    """Fetch the files of a repository of the Hugging Face hub that match some patterns; the folder they are in."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        names = shipped_names()
        raise UsageError(
            f"no model {name!r}{nearest(name, names)}: there is no folder of this name here. These models ship: "
            f"{', '.join(names)}. Others are given by their folder, or as owner/name on the Hugging Face hub"
        )
    try:
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=list(files))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{name!r} is neither a model folder here nor could it be fetched from the Hugging Face hub ({reason})"
        ) from error
    return Path(found)
