"""Networks: the multilayer perceptron of the paper's 2-D experiments."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmdgs.randomness import seeded


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """torch's linear layer with its usual start, U(-1/sqrt(inputs), 1/sqrt(inputs)), from an explicit generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer


class MLP(nn.Module):
    """A perceptron with Swish (SiLU) activations: x (B, inputs) -> (B, outputs).

    The authors' 2-D energy network is MLP(2, 2): four hidden layers of 400 units and two outputs that are
    summed to the energy. Their KL baseline is MLP(2, 4): two means and two log standard deviations.
    """

    def __init__(self, inputs: int, outputs: int, *, width: int = 400, depth: int = 4, seed: int = 0) -> None:
        super().__init__()
        if min(inputs, outputs, width, depth) < 1:
            raise ValueError(f"sizes must be at least 1, got {inputs=}, {outputs=}, {width=}, {depth=}")
        generator = seeded(seed)
        layers = [_linear(a, b, generator) for a, b in pairwise([inputs] + [width] * depth + [outputs])]
        modules: list[nn.Module] = [layers[0]]
        for layer in layers[1:]:
            modules += [nn.SiLU(), layer]
        self.layers = nn.Sequential(*modules)

    def __init_subclass__(cls) -> None:
        if "forward" in cls.__dict__ and "gradient_and_hessian" not in cls.__dict__:
            cls.gradient_and_hessian = None  # type: ignore[assignment]  # it would be another function's Hessian

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @torch.no_grad()
    def gradient_and_hessian(
        self, x: Float[Tensor, "batch d"]
    ) -> tuple[Float[Tensor, "batch d"], Float[Tensor, "batch d d"]]:
        """The gradient and the Hessian of the summed outputs, in closed form.

        With z_l = W_l a(z_{l-1}) + b_l, tangents T_l = dz_l/dx and g_l the gradient of the output in a(z_l),

            Hessian = sum_l T_l' diag(g_l a''(z_l)) T_l.

        So the tangents go forward with the value, as d more rows of one matrix product a layer, and one
        gradient comes back: two thirds of the work of differentiating twice, and a third of its overhead.
        """
        first, *rest = (layer for layer in self.layers if isinstance(layer, nn.Linear))
        z, tangents = first(x), first.weight.mT[:, None, :].expand(-1, len(x), -1)  # (d, B, width)
        stages = []
        for layer in rest:
            s = torch.sigmoid(z)
            activated, u = z * s, s * (1 - s)
            slope, curvature = torch.addcmul(s, z, u), u * (2 + z * (1 - 2 * s))
            stages.append((tangents, slope, curvature))
            if layer is not rest[-1]:
                joint = torch.cat([activated[None], tangents * slope]) @ layer.weight.mT
                z, tangents = joint[0] + layer.bias, joint[1:]
        gradient = rest[-1].weight.sum(0).expand(len(x), -1)
        hessian = x.new_zeros(len(x), x.shape[1], x.shape[1])
        for layer, (tangents, slope, curvature) in zip([first, *rest][-2::-1], reversed(stages), strict=True):
            weighted = tangents * (gradient * curvature)
            hessian.baddbmm_(weighted.transpose(0, 1), tangents.permute(1, 2, 0))
            gradient = (gradient * slope) @ layer.weight
        return gradient, hessian
