"""Grey denoisers of others, in [0, 1]: DnCNNs and a U-Net; their networks, and weights from files.

Zhang et al., 2017, "Beyond a Gaussian denoiser"; Mohan et al., 2020, "Robust and interpretable
blind image denoising via bias-free convolutional neural networks".

    pretrained/{dncnn,unet}/{bias,bias_free}/0-{10,30,55,100}.pt   of the repository
        LabForComputationalVision/bias_free_denoising (MIT): blind, for every sigma of a range in
        255ths; checkpoints of which only the tensors are read
    dncnn{6,17}{L,M,H,N}.mpk   in the wheel scico 0.0.7 of PyPI (BSD): for sigma 0.06, 0.1 or 0.2,
        or told a sigma up to 0.2 (N); read by `pip install msgpack`
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, blind_denoiser, clean_denoiser
from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel
from mmdgs.pickled import read_checkpoint

WIDTH, LAYERS = 64, 20
ADDED = 1e-5  # to the deviations of a scaling, to variances in a batch normalisation
ARRAY = 1  # the type of msgpack extension by which flax keeps arrays


class Scale(nn.Module):
    """A batch normalisation without biases: a factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.running_var = nn.Buffer(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight / (self.running_var.sqrt() + ADDED))[:, None, None]


class DnCNN(nn.Module):
    """The noise of x_t (B, 1, H, W) by 3 x 3 convolutions, taken off it; any size.

    One that is told sigma has it as a second channel.
    """

    def __init__(
        self, layers: int, norm: type[nn.Module], *, bias: bool = False, told: bool = False,
        padding: Literal["zeros", "circular"] = "zeros",
    ) -> None:  # fmt: skip
        super().__init__()

        def convolution(inputs: int, outputs: int) -> nn.Conv2d:
            return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias, padding_mode=padding)

        images, hidden = 2 if told else 1, range(layers - 2)
        with torch.random.fork_rng(devices=()):  # weights come from files
            self.first_layer = convolution(images, WIDTH)
            self.hidden_layer_list = nn.ModuleList(convolution(WIDTH, WIDTH) for _ in hidden)
            self.bn_layer_list = nn.ModuleList(norm(WIDTH) for _ in hidden)
            self.last_layer = convolution(WIDTH, images)

    def forward(self, x_t: Tensor, sigma: float | None = None) -> Tensor:
        told = [] if sigma is None else [torch.full_like(x_t, sigma)]
        h = self.first_layer(torch.cat([x_t, *told], 1)).relu()
        for layer, norm in zip(self.hidden_layer_list, self.bn_layer_list, strict=True):
            h = norm(layer(h)).relu()
        return x_t - self.last_layer(h)[:, :1]


class UNet(nn.Module):
    """The clean image (B, 1, H, W) of even sides by two scales of convolutions; no biases."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (
            (1, 32, 5),
            (32, 32, 3),
            (32, 64, 3),
            *[(64, 64, 3)] * 3,
            (64, 64, 4),
            (96, 32, 3),
        )
        for i, (inputs, outputs, side) in enumerate((*shapes, (32, 1, 5)), 1):
            kind: Any = nn.ConvTranspose2d if i == 7 else nn.Conv2d
            ways = {"stride": 2 if i in (3, 7) else 1, "dilation": {5: 2, 6: 4}.get(i, 1)}
            ways |= {"padding": ways["dilation"] * ((side - 1) // 2)}
            with torch.random.fork_rng(devices=()):
                self.add_module(f"conv{i}", kind(inputs, outputs, side, bias=False, **ways))

    def forward(self, x_t: Tensor) -> Tensor:
        h = fine = self._after(self._after(x_t, 1), 2)
        for i in range(3, 8):
            h = self._after(h, i)
        return self._convolved(self._after(torch.cat([h, fine], 1), 8), 9)

    def _convolved(self, x: Tensor, i: int) -> Tensor:
        out: Tensor = getattr(self, f"conv{i}")(x)
        return out

    def _after(self, x: Tensor, i: int) -> Tensor:
        return self._convolved(x, i).relu()


def load_blind(path: Path) -> Denoiser:
    """A network of bias_free_denoising, which sees no level."""
    with torch.serialization.safe_globals([argparse.Namespace]):  # the options of its training
        state = read_checkpoint(path)["model"][0]
    if "conv1.weight" in state:
        return blind_denoiser(_with(UNet(), state))
    bias = "first_layer.bias" in state
    network = DnCNN(LAYERS, nn.BatchNorm2d if bias else Scale, bias=bias)
    return blind_denoiser(_with(network, state))


def load_scico(path: Path) -> Denoiser:
    """A network of scico, which is told the level where it takes one."""
    try:
        import msgpack  # type: ignore[import-not-found]  # no dependency of ours
    except ImportError as error:
        raise UsageError(f"{path} is read by msgpack: pip install msgpack") from error
    content = msgpack.unpackb(path.read_bytes(), ext_hook=_array)
    parts, statistics = content["params"], content["batch_stats"]
    kernels = {"first_layer": parts["conv_start"], "last_layer": parts["conv_end"]}
    state: dict[str, Tensor] = {}
    for i in range(len(statistics)):
        block, seen = (of[f"ConvBNBlock_{i}"] for of in (parts, statistics))
        kernels[f"hidden_layer_list.{i}"] = block["Conv_0"]
        norm = block["BatchNorm_0"] | seen["BatchNorm_0"]
        names = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
        state |= {f"bn_layer_list.{i}.{own}": norm[name] for own, name in names.items()}
    state |= {f"{name}.weight": of["kernel"].permute(3, 2, 0, 1) for name, of in kernels.items()}
    told = state["first_layer.weight"].shape[1] == 2
    layers = len(statistics) + 2
    network = _with(DnCNN(layers, nn.BatchNorm2d, told=told, padding="circular"), state)
    if not told:
        return blind_denoiser(network)

    def mean(x_t: Tensor, level: NoiseLevel) -> Tensor:
        out: Tensor = network(x_t / level.alpha, level.ratio)
        return out

    return clean_denoiser(mean)


def _array(kind: int, data: bytes) -> Tensor:
    import msgpack

    if kind != ARRAY:
        raise UsageError(f"the file holds an object of type {kind}, which is no array of flax")
    shape, dtype, content = msgpack.unpackb(data, raw=True)
    values = numpy.frombuffer(content, dtype=dtype.decode()).reshape(shape)
    return torch.from_numpy(values.copy())


def _with(network: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A network with its weights; a scaling leaves out what it does not have."""
    missing, _ = network.load_state_dict(state, strict=False)
    if lost := [name for name in missing if not name.endswith("num_batches_tracked")]:
        raise UsageError(f"the file lacks {len(lost)} weights of the network, such as {lost[0]}")
    return network.requires_grad_(False).eval()
