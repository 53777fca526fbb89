"""Files of instruments: TIFF stacks (ImageJ, OME) by tifffile, FITS by astropy; read and written.

Every plane (page, slice, time, channel of a fluorescence image) is an image of its own; samples of
red, green and blue are one in colours. Results are written as the file was: its axes, its type, its
units and metadata. Both libraries come with `pip install "mmdgs[science]"`.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mmdgs.data.decoding import Unreadable
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.reading import most_unpacked

TIFF, FITS = (".tif", ".tiff"), (".fits", ".fit", ".fts")
EXTRA = 'install it with: pip install "mmdgs[science]"'
BITS = {np.dtype(np.uint8): 8, np.dtype(np.uint16): 16}
"""Types whose values have a white of their own."""
IMAGEJ_TYPES = ("uint8", "uint16", "float32")


@dataclass(frozen=True)
class Scale:
    """What of a file's values is 0 and what is 1; the values at which its type clips."""

    low: float
    high: float
    given: bool = False
    """Whether a person said it (--range): then noise has the units of the file, too."""
    clips: tuple[float, float] | None = None

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Where values in [0, 1] units were clipped."""
        if self.clips is None:
            return None
        low, high = ((value - self.low) / self.width for value in self.clips)
        return low + 0.25 / self.width, high - 0.25 / self.width  # float32 keeps a quarter level


@dataclass(frozen=True)
class Range:
    """What maps to [0, 1]: two values of the file, or two percentiles of its values."""

    low: float
    high: float
    percentiles: bool = False

    def scale(self, values: np.ndarray, clips: tuple[float, float] | None) -> Scale:
        low, high = self.low, self.high
        if self.percentiles:
            known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
            low, high = (float(np.percentile(known, share)) for share in (low, high))
        if not low < high:
            raise UsageError(f"the range is from {low:g} to {high:g}: the first must be below")
        return Scale(low, high, True, clips)


def parse_range(text: str | None) -> Range | None:
    """LOW,HIGH in the values of a file, or percentiles such as 0.1%,99.9%."""
    if text is None:
        return None
    percentiles = text.count("%") == 2
    try:
        low, high = (float(part.strip().removesuffix("%")) for part in text.split(","))
    except ValueError:
        low = high = math.nan
    if not (low < high and math.isfinite(high - low)) or (
        percentiles and not 0 <= low < high <= 100
    ):
        raise UsageError(
            f"--range must be two values of the file, LOW,HIGH, or percentiles of its values, such "
            f"as 100,4095 or 0.1%,99.9%, got {text!r}"
        )
    return Range(low, high, percentiles)


@dataclass(frozen=True)
class Stored:
    """How images lie in a file: results are written like it."""

    kind: str
    dtype: np.dtype
    axes: str
    shape: tuple[int, ...]
    """Of the whole file, in the order of the axes."""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def planes(self) -> int:
        return math.prod(
            n for n, axis in zip(self.shape, self.axes, strict=True) if axis not in "SYX"
        )

    @property
    def suffix(self) -> str:
        return ".fits" if self.kind == "FITS" else ".ome.tif" if "ome" in self.metadata else ".tif"

    @property
    def one_plane(self) -> Stored:
        """How a file of one of the planes would be."""
        kept = [(axis, n) for axis, n in zip(self.axes, self.shape, strict=True) if axis in "SYX"]
        axes, shape = zip(*kept, strict=True)
        metadata = {name: value for name, value in self.metadata.items() if name != "ome"}
        return Stored(self.kind, self.dtype, "".join(axes), shape, metadata)


@contextmanager
def _library(name: str) -> Iterator[None]:
    """Any error of a library's reader becomes `Unreadable`; its warnings are of no concern."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Unreadable:
        raise
    except ModuleNotFoundError as error:
        raise Unreadable(f"this kind of file needs {error.name}; {EXTRA}") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise Unreadable(f"{name}: {error}" if str(error) else type(error).__name__) from error


def is_instrument(name: str, content: bytes) -> bool:
    """Whether a file is read here: FITS, and TIFF but for what Pillow knows better (palettes,
    transparency, turned photographs, compression without the package `imagecodecs`).
    """
    suffix = Path(name).suffix.lower()
    if suffix not in TIFF:
        return suffix in FITS
    try:
        import tifffile

        with tifffile.TiffFile(io.BytesIO(content)) as file:
            page = file.series[0].keyframe
            packed = page.compression != 1 and find_spec("imagecodecs") is None
            turned = "Orientation" in page.tags and page.tags["Orientation"].value != 1
            return not (packed or turned or page.photometric == 3 or page.samplesperpixel in (2, 4))
    except Exception:  # no tifffile, or no TIFF: Pillow reads the first page, or says what is wrong
        return False


def read_planes(name: str, content: bytes) -> tuple[np.ndarray, Stored]:
    """The values of a file (planes, C, H, W) as they are stored, and how they are."""
    if Path(name).suffix.lower() in FITS:
        return _read_fits(content)
    return _read_tiff(content)


def _check_size(shape: tuple[int, ...], dtype: np.dtype, content: bytes) -> None:
    size = math.prod(shape) * dtype.itemsize
    if size > most_unpacked(len(content)):
        raise Unreadable(f"it would unpack to {size:,} bytes: a decompression bomb?")


def _read_tiff(content: bytes) -> tuple[np.ndarray, Stored]:
    with _library("tifffile"):
        import tifffile

        with tifffile.TiffFile(io.BytesIO(content)) as file:
            series = file.series[0]
            _check_size(series.shape, series.dtype, content)
            values, page = series.asarray(), series.keyframe
            metadata: dict[str, Any] = {"imagej": file.imagej_metadata} if file.is_imagej else {}
            metadata |= {"ome": file.ome_metadata} if file.is_ome else {}
            sizes: list[Any] = [page.tags.get(f"{axis}Resolution") for axis in "XY"]
            unit: Any = page.tags.get("ResolutionUnit")
            if all(sizes):
                pairs = [tag.value for tag in sizes]
                metadata |= {"resolution": pairs, "unit": unit.value if unit else 1}
            inverted = page.photometric == 0
    stored = Stored("TIFF", values.dtype.newbyteorder("="), series.axes, values.shape, metadata)
    values = values.astype(stored.dtype, copy=False)
    if not {"Y", "X"} <= set(stored.axes) or values.dtype.kind not in "uif":
        raise Unreadable(f"its axes are {stored.axes} and its values {values.dtype}: no images")
    if inverted:
        if values.dtype not in BITS:
            raise Unreadable("its values are inverted (white is 0)")
        values = np.iinfo(values.dtype).max - values
    axes = stored.axes
    order = [i for i, axis in enumerate(axes) if axis not in "SYX"]
    last = [axes.index(axis) for axis in "SYX" if axis in axes]
    values = values.transpose(order + last)
    samples = values.shape[-3] if "S" in axes else 1
    if samples not in (1, 3):
        raise Unreadable(f"it has {samples} samples a pixel, expected 1 or 3")
    return values.reshape(-1, samples, *values.shape[-2:]), stored


def _read_fits(content: bytes) -> tuple[np.ndarray, Stored]:
    with _library("astropy"):
        from astropy.io import fits

        with fits.open(io.BytesIO(content), memmap=False) as units:
            images = [unit for unit in units if unit.is_image and len(unit.shape) >= 2]
            if not images:
                raise Unreadable("no part of it is an image")
            first = images[0]
            _check_size(first.shape, np.dtype(np.float64), content)
            values, header = first.data, first.header.copy(strip=True)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    axes = "Q" * (values.ndim - 2) + "YX"
    stored = Stored("FITS", values.dtype, axes, values.shape, {"header": header})
    return values.reshape(-1, 1, *values.shape[-2:]), stored


def scale_of(values: np.ndarray, given: Range | None) -> Scale:
    """What of stored values is 0 and 1: what was asked for, or the ends of the type."""
    bits = BITS.get(values.dtype)
    clips = None if bits is None else (0.0, 2.0**bits - 1)
    if given is not None:
        return given.scale(values, clips)
    if bits is not None:
        return Scale(-0.5, 2.0**bits - 0.5, False, clips)
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if values.dtype.kind != "f" or low < 0 or high > 1:
        span = f"its {values.dtype} values lie between {low:,.6g} and {high:,.6g}"
        raise Unreadable(
            f"{span}: say what is black and what is white, such as --range {low:.6g},{high:.6g} or "
            "--range 0.1%,99.9%"
        )
    return Scale(0.0, 1.0)


def in_units(plane: np.ndarray, scale: Scale) -> np.ndarray:
    """A plane as float32, 0 at the low end of the scale and 1 at the high one; none is clipped."""
    return ((plane.astype(np.float64) - scale.low) / scale.width).astype(np.float32)


def write_like(
    path: Path, images: np.ndarray, stored: Stored, scale: Scale, *, spread: bool
) -> float:
    """Write images (planes, C, H, W) in [0, 1] units as a file such as the stored one.

    Values have its units and type; returns the share that the type had to clip. Standard deviations
    (`spread`) are float32.
    """
    values = images.astype(np.float64) * scale.width + (0 if spread else scale.low)
    dtype, share = np.dtype(np.float32) if spread else stored.dtype, 0.0
    if dtype.kind in "ui":
        values, ends = values.round(), np.iinfo(dtype.name)
        share = float(((values < ends.min) | (values > ends.max)).mean())
        values = values.clip(ends.min, ends.max)
    order = [i for i, axis in enumerate(stored.axes) if axis not in "SYX"]
    order += [stored.axes.index(axis) for axis in "SYX" if axis in stored.axes]
    values = values.reshape([stored.shape[i] for i in order]).transpose(np.argsort(order))
    content = io.BytesIO()
    write = _write_fits if stored.kind == "FITS" else _write_tiff
    write(content, values.astype(dtype), stored)
    write_atomically(path, content.getvalue())
    return share


def _write_fits(stream: io.BytesIO, values: np.ndarray, stored: Stored) -> None:
    from astropy.io import fits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        header = stored.metadata["header"].copy()
        for name in ("BSCALE", "BZERO", "BLANK", "CHECKSUM", "DATASUM"):
            header.remove(name, ignore_missing=True)
        fits.PrimaryHDU(values, header).writeto(stream)


def _write_tiff(stream: io.BytesIO, values: np.ndarray, stored: Stored) -> None:
    import tifffile

    metadata, axes = stored.metadata, stored.axes
    options: dict[str, Any] = {"photometric": "rgb" if "S" in axes else "minisblack"}
    if "resolution" in metadata:
        (a, b), (c, d) = metadata["resolution"]
        options |= {"resolution": (a / b, c / d), "resolutionunit": metadata["unit"]}
    if axes.find("S") not in (-1, len(axes) - 1):
        options["planarconfig"] = "separate"
    ours = set(axes) <= set("TZCYXS")
    if metadata.get("ome") and ours:
        kind = {"float32": "float", "float64": "double"}.get(values.dtype.name, values.dtype.name)
        description = re.sub(
            r'(<(?:\w+:)?Pixels\b[^>]*\bType=")[^"]*', rf"\g<1>{kind}", metadata["ome"]
        )
        options |= {"description": description.encode(), "metadata": None}
    elif metadata.get("imagej") is not None and values.dtype.name in IMAGEJ_TYPES and ours:
        kept = ("spacing", "unit", "finterval", "fps", "Info", "Labels", "LUTs", "mode")
        own = {name: x for name, x in metadata["imagej"].items() if name in kept}
        # ImageJ has its axes in one order; the file had them so.
        options |= {"imagej": True, "metadata": {**own, "axes": axes}}
    else:
        options["metadata"] = {"axes": axes}
    tifffile.imwrite(stream, values, **options)
