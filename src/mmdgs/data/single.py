"""Images of any sizes, one by one with a name each, as they lie in files and folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

import torch
from torch import Tensor

from mmdgs.data.decoding import Unreadable, announced, decode_deep
from mmdgs.data.folders import LARGEST, is_gallery, open_gallery
from mmdgs.data.images import image_array, load_samples, read_array
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError
from mmdgs.files import read_file, read_npy
from mmdgs.memory import memory_of
from mmdgs.reading import reading

REPEATED = "The image is grey and the model's are in colour: it was repeated in all three channels"
WITH_ITS_NOISE = "and so was its noise, which the model takes for independent."
COLOUR_TO_GREY = (
    "The image is in colour and the model's are grey: its luma was taken. "
    "Its noise is that of the luma."
)
MOST_PIXELS = 1 << 24
HELD = 0.5
"""Of memory, which images may take that are read together."""
LONGEST_NAME, LONGEST_NUMBER = 120, 9
"""Bytes of an image's name, and digits after it: systems take 143 to 255 in all."""
RESERVED = ("index.html", "posterior.json")
"""Names that a folder of results needs for itself."""

Remarks = dict[str, list[tuple[str, str]]]
"""By kind, pairs of an image's name and the remark on it (`decoding.Decoded`)."""


@dataclass(frozen=True)
class NamedImage:
    """An image (C, H, W), float32 in [0, 1] units, with a name of its own in the run."""

    name: str
    image: Tensor
    source: str = ""
    """The path of its file, where it has one of its own."""

    def in_channels(self, channels: int, *, clean: bool) -> tuple[Tensor, tuple[str, ...]]:
        """The image with so many channels, and a sentence about it where they were made."""
        if len(self.image) == channels:
            return self.image, ()
        if channels == 3 and len(self.image) == 1:
            remark = f"{REPEATED}." if clean else f"{REPEATED}, {WITH_ITS_NOISE}"
            return self.image.expand(3, -1, -1).clone(), (remark,)
        if channels == 1 and len(self.image) == 3:
            luma = torch.tensor([0.299, 0.587, 0.114])
            return torch.einsum("c,chw->hw", luma, self.image)[None], (COLOUR_TO_GREY,)
        counts = f"{len(self.image)} channels, and the model's have {channels}"
        raise UsageError(f"the image {self.name} has {counts}")


def named_images(
    sources: Sequence[str], *, data_dir: Path | None = None, limit: int | None = None
) -> list[NamedImage]:
    """All images of files, folders, zips, .npz or .npy arrays and sets such as cifar10:test.

    Files are decoded at full depth (`decode_deep`). A .npy holds one image (H, W), (H, W, C) or (C,
    H, W), an .npz many (`image_array`), of 8 bits or floating point; only these may have values
    beyond [0, 1], as noise brings them.
    """
    remarks: Remarks = {}
    each = chain.from_iterable(_images(source, data_dir, remarks) for source in sources)
    images: list[NamedImage] = []
    held, memory = 0, memory_of(torch.device("cpu"))
    for named in islice(each, limit):
        pixels, held = named.image[0].numel(), held + named.image.nbytes
        if pixels > MOST_PIXELS:
            size = f"{pixels:,} pixels, more than {MOST_PIXELS:,}"
            raise UsageError(f"the image {named.name} has {size}: make it smaller")
        if held > HELD * memory:
            raise UsageError(
                f"{len(images) + 1:,} images or more take {held / 1e9:.1f} GB of the "
                f"{memory / 1e9:.1f} of memory that there are: give fewer at a time "
                f"(--n {len(images)})"
            )
        images.append(named)
    announced(remarks)
    names = file_names([named.name for named in images], RESERVED)
    return [replace(named, name=name) for name, named in zip(names, images, strict=True)]


def _images(source: str, data_dir: Path | None, remarks: Remarks) -> Iterator[NamedImage]:
    """The images of a source with their names there."""
    path = Path(source).expanduser()
    if is_gallery(path):
        with open_gallery(path) as gallery:
            for name in gallery.names:
                image = _decoded(partial(gallery.read, name), f"{path}/{name}", remarks)
                file = str(path / name) if path.is_dir() else ""
                yield NamedImage(str(Path(name).with_suffix("")), image, file)
        return
    kind = path.suffix.lower() if path.is_file() else None
    if kind not in (None, ".npy", ".npz"):
        image = _decoded(partial(read_file, path, LARGEST), str(path), remarks)
        yield NamedImage(path.stem, image, str(path))
    elif kind == ".npy":
        with reading(path, "a .npy of an image (H, W), (H, W, C) or (C, H, W)"):
            array = read_npy(path, 3 * MOST_PIXELS)
            image = image_array(array[(None,) * (4 - array.ndim)], path.name)[0]
        yield NamedImage(path.stem, _in_units(image, path), str(path))
    else:
        if kind == ".npz":
            with reading(path, "an .npz of images"):
                images = image_array(read_array(path), path.name)
        else:
            images = load_samples(source, data_dir=data_dir).images
        for i, image in enumerate(images):
            yield NamedImage(f"{i:06d}", _in_units(image, source))


def _decoded(read: Callable[[], bytes], where: str, remarks: Remarks) -> Tensor:
    try:
        image = decode_deep(read(), most=MOST_PIXELS)
    except Unreadable as error:
        raise UsageError(f"the image {where} cannot be read: {error}") from error
    for kind, remark in image.remarks.items():
        remarks.setdefault(kind, []).append((where, remark))
    return torch.from_numpy(image.pixels)


def _in_units(x: Tensor, where: object) -> Tensor:
    """An image (C, H, W) of an array: 8-bit levels by their midpoints, other values as they are."""
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
    """Whether `named_images` gives such a name, with a number at its end where it is taken."""
    if not isinstance(name, str):
        return False
    plain = re.sub(rf"-[0-9]{{1,{LONGEST_NUMBER}}}$", "", name)
    fits = any(file_names([text]) == [text] for text in (name, plain))
    return fits and name.casefold() not in RESERVED


def file_names(names: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Names that are fit for files and folders of any system, and no two alike."""
    taken = set(reserved)
    fitting = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "-_. " else "-" for c in name)
        plain = plain.encode()[:LONGEST_NAME].decode(errors="ignore").strip(". ") or "image"
        numbered = chain([plain], (f"{plain}-{number}" for number in count(2)))
        fitting.append(next(own for own in numbered if own.casefold() not in taken))
        taken.add(fitting[-1].casefold())
    return fitting
