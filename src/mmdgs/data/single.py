"""Images of any sizes, one by one with a name each, as they lie in files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.data.decoding import Unreadable, announced, decode_deep
from mmdgs.data.folders import LARGEST, is_gallery, open_gallery
from mmdgs.data.images import image_array, load_samples, read_array
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError
from mmdgs.files import read_file, read_npy
from mmdgs.reading import reading

GREY_REPEATED = (
    "The image is grey and the model's are in colour: it was repeated in all three channels, and so was its noise, "
    "which the model takes for independent."
)
GREY_SIMULATED = "The image is grey and the model's are in colour: it was repeated in all three channels."
COLOUR_TO_GREY = "The image is in colour and the model's are grey: its luma was taken. Its noise is that of the luma."
MOST_PIXELS = 1 << 24
LONGEST_NAME, LONGEST_NUMBER = 120, 9
"""Bytes of an image's name, and digits after it: systems take 143 to 255, and a file being written has a longer one."""
RESERVED = ("index.html", "posterior.json")
"""Names that a folder of results needs for itself."""


@dataclass(frozen=True)
class NamedImage:
    """An image (C, H, W), float32 in [0, 1] units, with a name that no other image of the run has."""

    name: str
    image: Tensor

    def in_channels(self, channels: int, *, clean: bool) -> tuple[Tensor, tuple[str, ...]]:
        """The image with so many channels, and a sentence about it where they were made."""
        if len(self.image) == channels:
            return self.image, ()
        if channels == 3 and len(self.image) == 1:
            return self.image.expand(3, -1, -1).clone(), (GREY_SIMULATED if clean else GREY_REPEATED,)
        if channels == 1 and len(self.image) == 3:
            luma = torch.tensor([0.299, 0.587, 0.114])
            return torch.einsum("c,chw->hw", luma, self.image)[None], (COLOUR_TO_GREY,)
        raise UsageError(f"the image {self.name} has {len(self.image)} channels, and the model's have {channels}")


def named_images(sources: Sequence[str], *, data_dir: Path | None = None, limit: int | None = None) -> list[NamedImage]:
    """All images of files, folders, zips, .npz or .npy arrays and sets such as cifar10:test, in the order given.

    Files are decoded at full depth (`decode_deep`). A .npy holds one image (H, W), (H, W, C) or (C, H, W), an .npz many
    (`image_array`), of 8 bits or floating point; only there values beyond [0, 1], as noise brings them, are kept.
    """
    found: list[tuple[str, Tensor]] = []
    remarks: dict[str, list[tuple[str, str]]] = {}
    for source in sources:
        path = Path(source).expanduser()
        if is_gallery(path):
            with open_gallery(path) as gallery:
                for name in gallery.names[: _left(limit, found)]:
                    if gallery.size(name) > LARGEST:
                        raise UsageError(f"the image {name} in {path} has more than {LARGEST:,} bytes")
                    image = _decoded(gallery.read(name), f"{path}/{name}", remarks)
                    found.append((str(Path(name).with_suffix("")), image))
        elif path.is_file() and path.suffix.lower() == ".npy":
            found.append((path.stem, _array(path)))
        elif path.is_file() and path.suffix.lower() != ".npz":
            found.append((path.stem, _decoded(read_file(path, LARGEST), str(path), remarks)))
        else:
            if path.is_file():  # an .npz
                with reading(path, "an .npz of images"):
                    images = image_array(read_array(path), path.name)[: _left(limit, found)]
            else:
                images = load_samples(source, data_dir=data_dir).images[: _left(limit, found)]
            found += [(f"{i:06d}", _in_units(image, source)) for i, image in enumerate(images)]
        if limit is not None and len(found) >= limit:
            break
    announced(remarks)
    return _named(found[:limit])


def _left(limit: int | None, found: Sequence[object]) -> int | None:
    return None if limit is None else limit - len(found)


def _decoded(content: bytes, where: str, remarks: dict[str, list[tuple[str, str]]]) -> Tensor:
    try:
        image = decode_deep(content)
    except Unreadable as error:
        raise UsageError(f"the image {where} cannot be read: {error}") from error
    for kind, remark in image.remarks.items():
        remarks.setdefault(kind, []).append((where, remark))
    return torch.from_numpy(image.pixels)


def _array(path: Path) -> Tensor:
    array = read_npy(path, 3 * MOST_PIXELS)
    x = torch.from_numpy(array) if array.dtype in (np.uint8, np.float16, np.float32, np.float64) else None
    if x is not None and x.ndim == 2:
        x = x[None]
    elif x is not None and x.ndim == 3 and x.shape[0] not in (1, 3) and x.shape[2] in (1, 3):
        x = x.permute(2, 0, 1)
    if x is None or x.ndim != 3 or x.shape[0] not in (1, 3) or 0 in x.shape:
        raise UsageError(
            f"{path} must hold one image (H, W), (H, W, C) or (C, H, W) with 1 or 3 channels, uint8 or floating point; "
            f"got {array.dtype} {array.shape}"
        )
    return _in_units(x, path)


def _in_units(x: Tensor, where: object) -> Tensor:
    """An image (C, H, W) of an array: 8-bit levels by their midpoints, floating-point values as they are."""
    if x.dtype == torch.uint8:
        return midpoints(x[None])[0]
    if not torch.isfinite(x).all():
        raise UsageError(f"{where} holds values that are not finite")
    return x.float().contiguous()


def is_single(source: str) -> bool:
    """Whether a source is one image: a file that is neither a .zip nor an .npz."""
    path = Path(source).expanduser()
    return path.is_file() and path.suffix.lower() not in (".npz", ".zip")


def is_folder_name(name: object) -> bool:
    """Whether a name is one that `named_images` gives: with a number at its end where another image has that name."""
    if not isinstance(name, str):
        return False
    plain = re.sub(rf"-[0-9]{{1,{LONGEST_NUMBER}}}$", "", name)
    return name.casefold() not in RESERVED and any(file_names([one]) == [one] for one in (name, plain))


def _named(found: Sequence[tuple[str, Tensor]]) -> list[NamedImage]:
    """The images with names that are fit for folders, and no two alike."""
    for name, image in found:
        if image[0].numel() > MOST_PIXELS:
            raise UsageError(
                f"the image {name} has {image[0].numel():,} pixels, more than the limit of {MOST_PIXELS:,}"
            )
    names = file_names([name for name, _ in found], RESERVED)
    return [NamedImage(name, image) for name, (_, image) in zip(names, found, strict=True)]


def file_names(names: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Names that are fit for files and folders of any system, and no two alike."""
    taken = set(reserved)
    found = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "-_. " else "-" for c in name)
        plain = plain.encode()[:LONGEST_NAME].decode(errors="ignore").strip(". ") or "image"
        own, number = plain, 1
        while own.casefold() in taken:
            own, number = f"{plain}-{number + 1}", number + 1
        taken.add(own.casefold())
        found.append(own)
    return found
