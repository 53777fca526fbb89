"""Networks by name, for configurations and files: a name, its options, and presets of options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from mmdgs.errors import UsageError, first_line, nearest, shown, unknown_name
from mmdgs.networks.building import parameters_at_most
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.networks.ncsnv2 import NCSNv2
from mmdgs.networks.perceptron import MLP
from mmdgs.networks.residual_unet import ResidualUNet
from mmdgs.networks.spectrum_head import SpectrumHead
from mmdgs.networks.unet import UNet

MOST_TENSORS, MOST_NUMBERS = 5_000, 1 << 31
"""Parameters of any network: 8 GB in float32."""
NETWORKS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "unet": UNet,
    "residual-unet": ResidualUNet,
    "ncsnv2": NCSNv2,
    "classifier": ConvClassifier,
    "spectrum-head": SpectrumHead,
}
"""Each is built as Network(inputs, outputs, seed=..., **options)."""

# fmt: off
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"width": 400, "depth": 4}),
    "unet-tiny": ("unet", {
        "width": 8, "multipliers": [1, 2], "blocks": 1, "attention": [], "dropout": 0.0}),
    "unet-small": ("unet", {
        "width": 16, "multipliers": [1, 3, 6], "blocks": 1, "attention": [], "dropout": 0.0}),
    "unet-paper": ("unet", {
        "width": 128, "multipliers": [1, 2, 2, 2], "blocks": 2, "attention": [1], "dropout": 0.1}),
    "unet-photo": ("residual-unet", {"widths": [64, 128, 192, 256], "blocks": [3, 3, 3, 2]}),
    "ncsnv2": ("ncsnv2", {"width": 128}),
    "spectrum-head": ("spectrum-head", {
        "width": 64, "multipliers": [1, 2, 2], "blocks": 1, "attention": [2]}),
    "classifier": ("classifier", {"width": 32, "features": 64, "dropout": 0.2}),
}
# fmt: on
"""unet-small trains on a laptop; unet-paper is the authors' (32.9 million parameters at 3x32x32);
unet-photo takes photographs of any size (9.98 million); ncsnv2 is Song and Ermon's, a score network
(29.7 million)."""


def preset(name: str) -> tuple[str, dict[str, Any]]:
    """The network and the options a preset stands for."""
    if name not in PRESETS:
        raise unknown_name("model", name, PRESETS)
    network, options = PRESETS[name]
    return network, dict(options)


def conditional_options(name: str) -> dict[str, Any]:
    """The options with which a network takes the noise level, where it has to be told so."""
    network = NETWORKS.get(name)
    has = network is not None and "conditional" in inspect.signature(network).parameters
    return {"conditional": True} if has else {}


def build_network(
    name: str, inputs: int, outputs: int, options: Mapping[str, Any], *, seed: int = 0
) -> nn.Module:
    """A network by name; options it does not know are refused with the nearest name."""
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    signature = inspect.signature(NETWORKS[name]).parameters
    known = [key for key, p in signature.items() if p.kind is p.KEYWORD_ONLY and key != "seed"]
    for key in options:
        if key not in known:
            near = nearest(key, known)
            raise UsageError(f"the network {name!r} has no option {key!r}{near}; it has {known}")
    limit = f"{MOST_NUMBERS:,} numbers in {MOST_TENSORS:,} is the limit"
    try:
        with parameters_at_most(MOST_TENSORS, MOST_NUMBERS, limit):
            return NETWORKS[name](inputs, outputs, seed=seed, **options)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"cannot be built with {shown(dict(options))}: {first_line(error)}"
        raise UsageError(f"the network {name!r} {reason}") from error
