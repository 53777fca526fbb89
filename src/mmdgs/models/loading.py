"""load: whatever a network comes as, a model in one call; load_head: a head for a denoiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError, first_line, nearest
from mmdgs.files import read_json, read_text
from mmdgs.models import diffusers
from mmdgs.models.config import COVARIANCE, HEADS, VARIANCE_RATIO, ModelConfig
from mmdgs.models.edm import from_edm
from mmdgs.models.model import Model
from mmdgs.models.ncsnv2 import read_ncsnv2
from mmdgs.models.shipped import SHIPPED, shipped_folder
from mmdgs.models.weights import (
    CARD,
    CONFIG,
    FIT_FILES,
    SHARDS,
    WEIGHTS,
    load_weights,
    read_weights,
)
from mmdgs.networks.building import parameters_as_in
from mmdgs.reading import reading

CHECKPOINTS = (".pth", ".pt", ".ckpt")
LOSS = {VARIANCE_RATIO: "ocm", COVARIANCE: "covariance"}
"""What `mmdgs train --loss` calls the training of each kind of head."""


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

    `source` is a model of mmdgs (a training run's folder, a model's folder, or a name that ships:
    "mnist"), an NCSNv2 checkpoint (.pth: its moving average, or with ema=False its raw weights), a
    folder or pipeline of diffusers with a UNet2DModel, a folder of either kind on the Hugging Face
    hub ("owner/name", at a `revision`, with a `token`), an EDM-style network net(x, sigma) as a
    module, or a Model, which is returned as it is.

    `subfolder` is where in a folder to look. `size` is the side of the images, where the source
    does not say it: NCSNv2 networks take any and have 32 unless it is given (64 with the levels of
    the public CelebA checkpoint). Files are read to the CPU in float32 unless `device` and `dtype`
    say otherwise; a network that is given stays where and as it is.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise UsageError(f"size must be the side of the images in pixels, got {size!r}")
    if isinstance(source, str | Path):
        hub = {"revision": revision, "token": token}
        model = _from_name(str(source), ema, subfolder or "", size, hub)
    else:
        model = _from_object(source, size)
    model = model if size is None else model.sized(size, size)
    if size is not None and model.param is not None and model.shape[1:] != (size, size):
        raise UsageError(f"{model.source} has its own shape {model.shape}: leave out size")
    for place in (device, dtype):
        if place is not None:
            model.network.to(place)
    return model


def _from_object(source: Any, size: int | None) -> Model:
    """What is in memory already."""
    kind = type(source).__name__
    if isinstance(source, Model):
        return source
    if hasattr(source, "unet") and hasattr(source, "scheduler"):
        return diffusers.from_pipeline(source.unet, source.scheduler, kind, size=size)
    if kind == diffusers.NETWORK:
        raise UsageError(f"a {kind} does not know its schedule: give its pipeline, or its folder")
    if callable(source):
        return from_edm(source, size=size)
    raise UsageError(
        f"cannot make a model of a {kind}: give a path, a name, a diffusers pipeline or a network"
    )


def _from_name(name: str, ema: bool, inner: str, size: int | None, hub: dict[str, Any]) -> Model:
    """What lies in files, here or on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in CHECKPOINTS:
            raise UsageError(
                f"{path} is no checkpoint that can be read: expected {', '.join(CHECKPOINTS)} "
                "(NCSNv2), or a folder; of an EDM pickle give the module that its code loads"
            )
        return read_ncsnv2(path, name, ema=ema, size=size)
    if path.suffix in CHECKPOINTS and not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}")
    if not ema:
        raise UsageError(f"ema=False is for NCSNv2 checkpoints; {name!r} has one set of weights")
    here = path.is_dir() and (name not in SHIPPED or is_model_folder(path / inner))
    folder = path / inner if here else shipped_folder(name) or _fetched(name, inner, hub)
    if _is_ours(folder):
        model = _read_model(folder, name)
    else:
        model = diffusers.read_pipeline(folder, name, size=size)
    model.folder = folder
    return model


def is_model_folder(folder: Path) -> bool:
    """Whether a folder says that it is a model, of mmdgs or of diffusers."""
    return any((folder / name).is_file() for name in (CONFIG, diffusers.INDEX))


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model of mmdgs, by its configuration."""
    return (folder / CONFIG).is_file() and "mmdgs_format" in read_json(folder / CONFIG)


def _read_model(folder: Path, source: str) -> Model:
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
    """The folder of a repository of the hub: what it says of itself, then the weights needed."""
    inner = f"{subfolder}/" if subfolder else ""
    folder = _from_hub(name, ["*.json"], hub) / subfolder
    if _is_ours(folder):
        _from_hub(name, [inner + file for file in (CARD, WEIGHTS, SHARDS, *FIT_FILES)], hub)
        return folder
    network = diffusers.network_folder(folder)
    if network is not None:
        inner += "unet/" if network != folder else ""
        _from_hub(name, [f"{inner}{diffusers.WEIGHTS}*.safetensors"], hub)
    return folder


def _from_hub(name: str, files: Sequence[str], hub: dict[str, Any]) -> Path:
    """Fetch the files of a hub's repository that match some patterns; the folder they are in."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(
            f"no model {name!r}{nearest(name, SHIPPED)}: there is no folder of this name here. "
            f"These models ship: {', '.join(sorted(SHIPPED))}. Others are given by their folder, "
            "or as owner/name on the Hugging Face hub"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(
            f"{name!r} is neither a model folder here nor could it be fetched from the Hugging "
            f"Face hub ({first_line(error)})"
        ) from error


def load_head(source: str | Path | Model, denoiser: Model, *, kind: str | None = None) -> Any:
    """A head for `OcmMoments(denoiser, head)` or `ModulatedMoments(denoiser, head)`, on its device.

    `source` is a folder of `mmdgs train --loss ocm` ("variance-ratio") or `--loss covariance`
    ("covariance"), here or on the hub, or a model; `kind` says which of the two is expected. A head
    for other weights than the denoiser's is refused.
    """
    model = load(source)
    name = "the head" if isinstance(source, Model) else f"the head {source}"
    if model.param not in ((kind,) if kind else HEADS):
        raise UsageError(
            f"{name} is none: its output is {model.param!r}, expected "
            f"{kind or ' or '.join(HEADS)!r}; make one with `mmdgs train --loss "
            f"{LOSS[kind or VARIANCE_RATIO]} --denoiser ...`"
        )
    if model.shape != denoiser.shape and not (model.any_size and denoiser.any_size):
        raise UsageError(
            f"{name} is for data of shape {model.shape}, and {denoiser.source} has {denoiser.shape}"
        )
    own, digest = model.config.head["denoiser"], denoiser.digest
    if own != digest:
        raise UsageError(
            f"{name} was trained for a denoiser with the weights {own[:12]}..., and "
            f"{denoiser.source} has {digest[:12]}...: its variances are those of another model; "
            f"train one with `mmdgs train --loss {LOSS[model.config.param]} --denoiser "
            f"{denoiser.source}`"
        )
    return model.to(denoiser.device).head_of(model.network)
