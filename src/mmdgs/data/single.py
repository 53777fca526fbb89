"""Images of any sizes, one by one with a name each, as they lie in files and folders."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import instruments
from mmdgs.data.decoding import Unreadable, announced, decode_deep, span_remarks
from mmdgs.data.folders import LARGEST, SUFFIXES, is_gallery, open_gallery
from mmdgs.data.images import image_array, load_samples, read_array
from mmdgs.data.instruments import Range, Scale, Stored
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError
from mmdgs.files import read_file, read_npy
from mmdgs.memory import memory_of
from mmdgs.reading import reading
from mmdgs.sensors import Sensor

logger = logging.getLogger("mmdgs")
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
    """An image (C, H, W), float32 in [0, 1] units, with a name of its own in the run.

    `source` is the path of its file, where it has one; `scale` says what of the file's values is 0
    and 1; `stored` is how the file of an instrument keeps its images, and `plane` the number of
    this one there. Of such a file NaN is what was not measured.
    """

    name: str
    image: Tensor
    source: str = ""
    scale: Scale | None = None
    stored: Stored | None = None
    plane: int = 0

    def noise(self, noise: float | Sensor) -> float | Sensor:
        """A noise in [0, 1] units: where a range was given it has the units of the file."""
        if self.scale is None or not self.scale.given:
            return noise
        low, width = self.scale.low, self.scale.width
        return noise.scaled(1 / width, -low / width) if isinstance(noise, Sensor) else noise / width

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
    sources: Sequence[str],
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    given: Range | None = None,
) -> list[NamedImage]:
    """All images of files, folders, zips, .npz or .npy arrays and sets such as cifar10:test.

    Files are decoded at full depth (`decode_deep`). A .npy holds one image (H, W), (H, W, C) or (C,
    H, W), an .npz many (`image_array`), of 8 bits or floating point; only these may have values
    beyond [0, 1], as noise brings them. Every plane of a stack is an image. A range that is `given`
    says what of the values of files maps to [0, 1]; what lies beyond stays beyond.
    """
    remarks: Remarks = {}
    each = chain.from_iterable(_images(source, data_dir, remarks, given) for source in sources)
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


def _images(
    source: str, data_dir: Path | None, remarks: Remarks, given: Range | None
) -> Iterator[NamedImage]:
    """The images of a source with their names there."""
    path = Path(source).expanduser()
    if is_gallery(path):
        with open_gallery(path, (*SUFFIXES, *instruments.FITS)) as gallery:
            for name in gallery.names:
                file = str(path / name) if path.is_dir() else ""
                yield from _decoded(partial(gallery.read, name), path, name, file, remarks, given)
        return
    kind = path.suffix.lower() if path.is_file() else None
    if kind not in (None, ".npy", ".npz"):
        read = partial(read_file, path, LARGEST)
        yield from _decoded(read, path.parent, path.name, str(path), remarks, given)
    elif kind == ".npy":
        with reading(path, "a .npy of an image (H, W), (H, W, C) or (C, H, W)"):
            array = read_npy(path, 3 * MOST_PIXELS)
            image = image_array(array[(None,) * (4 - array.ndim)], path.name)[0]
        yield _of_array(path.stem, image, str(path), given)
    else:
        if kind == ".npz":
            with reading(path, "an .npz of images"):
                images = image_array(read_array(path), path.name)
        else:
            images = load_samples(source, data_dir=data_dir).images
        for i, image in enumerate(images):
            yield replace(_of_array(f"{i:06d}", image, source, given), source="")


def _of_array(name: str, x: Tensor, where: str, given: Range | None) -> NamedImage:
    """An image of an array, which no sensor has clipped."""
    bits = 8 if x.dtype == torch.uint8 else None
    named = _scaled(name, _in_units(x, where), bits, where, given)
    return replace(named, scale=named.scale and replace(named.scale, clips=None))


def _scaled(
    name: str, image: Tensor, bits: int | None, file: str, given: Range | None
) -> NamedImage:
    """An image in [0, 1] units of levels of so many bits (None: of values), on a scale given."""
    levels = 1.0 if bits is None else 2.0**bits
    start, clips = (0.0, None) if bits is None else (-0.5, (0.0, levels - 1))
    scale = Scale(start, start + levels, False, clips)
    if given is not None:
        values = start + levels * image.double().numpy()
        scale = given.scale(values, clips)
        image = torch.from_numpy(instruments.in_units(values, scale))
    return NamedImage(name, image, file, scale)


def _decoded(
    read: Callable[[], bytes],
    folder: Path,
    name: str,
    file: str,
    remarks: Remarks,
    given: Range | None,
) -> Iterator[NamedImage]:
    """The images of a file: one, or the planes of a stack."""
    where, stem = str(folder / name), str(Path(name).with_suffix("")).removesuffix(".ome")
    try:
        content = read()
        if instruments.is_instrument(name, content):
            yield from _planes(content, where, stem, file, remarks, given)
            return
        image = decode_deep(content, most=MOST_PIXELS)
    except Unreadable as error:
        raise UsageError(f"the image {where} cannot be read: {error}") from error
    for kind, remark in image.remarks.items():
        remarks.setdefault(kind, []).append((where, remark))
    yield _scaled(stem, torch.from_numpy(image.pixels), image.bits, file, given)


def _planes(
    content: bytes, where: str, stem: str, file: str, remarks: Remarks, given: Range | None
) -> Iterator[NamedImage]:
    """The planes of a file of an instrument, on one scale."""
    values, stored = instruments.read_planes(where, content)
    scale = instruments.scale_of(values, given)
    bits = instruments.BITS.get(values.dtype, 0)
    if given is None and bits > 8:
        for kind, remark in span_remarks(int(values.min()), int(values.max()), bits).items():
            remarks.setdefault(kind, []).append((where, remark))
    digits = len(str(len(values) - 1))
    for i, plane in enumerate(values):
        name = stem if len(values) == 1 else f"{stem}-{i:0{digits}d}"
        image = torch.from_numpy(instruments.in_units(plane, scale))
        yield NamedImage(name, image, file, scale, stored, i)


def _in_units(x: Tensor, where: object) -> Tensor:
    """An image (C, H, W) of an array: 8-bit levels by their midpoints, other values as they are."""
    if x.dtype == torch.uint8:
        return midpoints(x[None])[0]
    if not torch.isfinite(x).all():
        raise UsageError(f"{where} holds values that are not finite")
    return x.float().contiguous()


def noises_of(noise: float | str | Path | Sensor, images: Sequence[NamedImage]) -> list[Any]:
    """The noise of each image in [0, 1] units, from a number, a word for its estimate, a sensor, or
    a file of standard deviations: one plane for all, or one for each.
    """
    if not isinstance(noise, Path):
        return [noise if isinstance(noise, str) else image.noise(noise) for image in images]
    maps = named_images([str(noise)], given=Range(0.0, 1.0))
    if len(maps) not in (1, len(images)):
        raise UsageError(f"{noise} has {len(maps)} planes, expected one, or one of {len(images)}")
    deviations = []
    for image, own in zip(images, maps * (len(images) // len(maps)), strict=True):
        width = image.scale.width if image.scale and image.scale.given else 1.0
        if width == 1.0 and own.scale and own.scale.clips:  # levels, as those of an image
            width = own.scale.clips[1] + 1
        try:
            deviations.append((own.image / width).expand_as(image.image))
        except RuntimeError:
            shapes = f"{tuple(own.image.shape)}, and {image.name} is {tuple(image.image.shape)}"
            raise UsageError(f"the map of noise {noise} is {shapes}") from None
    return deviations


def write_results(
    folder: Path, images: Sequence[NamedImage], results_of: Callable[[int], Tensor]
) -> None:
    """Results of the images of instruments' files as such files, NAME-mean, NAME-std, NAME-draw-0
    and so on; `results_of(i)` are those of image i in this order, (2 + draws, C, H, W).

    A stack whose planes are all there is one file again; else each plane is one. Results of another
    size than the file's are left out: its coordinates are not theirs.
    """
    numbers, clipped = iter(range(len(images))), 0.0
    for stored, group in groupby(images, lambda image: image.stored):
        planes = list(group)
        own, scale = list(islice(numbers, len(planes))), planes[0].scale
        first = results_of(own[0])
        if stored is None or scale is None or first.shape[2:] != planes[0].image.shape[1:]:
            continue
        whole = [image.plane for image in planes] == [*range(stored.planes)]
        stem = planes[0].name.removesuffix("-" + "0" * len(str(stored.planes - 1)))
        files = {stem: own} if whole else {images[i].name: [i] for i in own}
        like = stored if whole else stored.one_plane
        titles = ["mean", "std", *(f"draw-{j}" for j in range(len(first) - 2))]
        for (name, places), (j, title) in product(files.items(), enumerate(titles)):
            values = torch.stack([results_of(i)[j] for i in places])
            values = values if "S" in like.axes else values.mean(1, keepdim=True)
            path = folder / f"{name}-{title}{like.suffix}"
            share = instruments.write_like(path, values.numpy(), like, scale, spread=title == "std")
            clipped = max(clipped, share)
    if clipped:
        words = "results have the type of their file, which clips up to %.2g%% of the values of one"
        logger.warning(words, 100 * clipped)


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
