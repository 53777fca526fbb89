"""from_pretrained: whatever a pretrained network comes as, a denoiser in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import read_json
from mmdgs.models import CONFIG, SHARDS, WEIGHTS, Model, from_hub, shipped
from mmdgs.pretrained import diffusion
from mmdgs.pretrained.edm import from_edm
from mmdgs.pretrained.ncsnv2 import read_ncsnv2
from mmdgs.pretrained.pretrained import Pretrained

CHECKPOINTS = (".pth", ".pt", ".ckpt")
SETTINGS = "*.json"


def from_pretrained(
    source: str | Path | Model | Callable[..., Tensor] | Any,
    *,
    ema: bool = True,
    subfolder: str | None = None,
    size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Pretrained:
    """A pretrained network as a denoiser.

    `source` is an NCSNv2 checkpoint (.pth: its moving average, or with ema=False its raw weights), a folder or
    pipeline of diffusers with a UNet2DModel, a model of mmdgs (a folder, an object, or one that ships, "mnist"),
    either of these on the Hugging Face hub ("owner/name"), or an EDM-style network net(x, sigma) as a module.

    `subfolder` is where in a folder to look. `size` is the side of the images, where the source does not say it:
    NCSNv2 networks take any and have 32 unless it is given (64 with the levels of the public CelebA checkpoint).
    Files are read to the CPU in float32 unless `device` and `dtype` say otherwise; a network that is given stays
    where and as it is.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise UsageError(f"size must be the side of the images in pixels, got {size!r}")
    if isinstance(source, str | Path):
        found = _from_name(str(source), ema, subfolder, size)
    else:
        found = _from_object(source, size)
    # Only what is asked for: diffusers warns of any dtype that is named, None too.
    wanted: dict[str, Any] = {
        name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None
    }
    if wanted:
        found.network.to(**wanted)
    return found


def _from_object(source: Any, size: int | None) -> Pretrained:
    """What is in memory already."""
    if isinstance(source, Pretrained):
        return source
    if isinstance(source, Model):
        return Pretrained.of(source)
    if hasattr(source, "unet") and hasattr(source, "scheduler"):
        return diffusion.from_pipeline(source.unet, source.scheduler, type(source).__name__, size=size)
    if type(source).__name__ == diffusion.NETWORK:
        raise UsageError(
            f"a {diffusion.NETWORK} does not know its schedule: give the pipeline it is part of, or its folder"
        )
    if callable(source):
        return from_edm(source, size=size)
    raise UsageError(
        f"cannot make a denoiser of a {type(source).__name__}: give a path, a name, a diffusers pipeline or a network"
    )


def _from_name(name: str, ema: bool, subfolder: str | None, size: int | None) -> Pretrained:
    """What lies in files, here or on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in CHECKPOINTS:
            raise UsageError(
                f"{path} is no checkpoint that can be read: expected {', '.join(CHECKPOINTS)} (NCSNv2), or a folder; "
                "an EDM pickle holds code: load it with its own code and give the module"
            )
        return Pretrained.of(read_ncsnv2(path, ema=ema, size=size), name)
    if path.suffix in CHECKPOINTS and not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}")
    if not ema:
        raise UsageError(f"ema=False is for NCSNv2 checkpoints; {name!r} has one set of weights")
    if path.is_dir():
        return _from_folder(path / (subfolder or ""), name, size)
    known = shipped(name)
    if known is not None:
        return _from_folder(known, name, size)
    return _from_folder(_fetched(name, subfolder or ""), name, size)


def _from_folder(folder: Path, source: str, size: int | None) -> Pretrained:
    """A folder is a model of mmdgs, or diffusers': its configuration says which."""
    if is_ours(folder):
        return Pretrained.of(Model.from_pretrained(folder), source)
    if diffusion.network_folder(folder) is None:
        raise UsageError(
            f"{folder} holds no model that is understood: expected {CONFIG} of mmdgs or of a {diffusion.NETWORK} in "
            "it or in its folder unet"
        )
    return diffusion.read_pipeline(folder, source, size=size)


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a model of mmdgs, by its configuration."""
    return (folder / CONFIG).is_file() and "mmdgs_format" in read_json(folder / CONFIG)


def _fetched(name: str, subfolder: str) -> Path:
    """The folder of a repository of the hub: first what it says of itself, then the weights that are needed."""
    folder = from_hub(name, [SETTINGS]) / subfolder
    inner = f"{subfolder}/" if subfolder else ""
    if is_ours(folder):
        from_hub(name, [inner + WEIGHTS, inner + SHARDS])
        return folder
    network = diffusion.network_folder(folder)
    if network is not None:
        inner += "unet/" if network != folder else ""
        from_hub(name, [f"{inner}{diffusion.WEIGHTS}*.safetensors"])
    return folder
