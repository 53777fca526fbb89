"""The multilayer perceptron of the paper's 2-D experiments, and closed forms for perceptrons."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise, repeat

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmdgs.networks.building import initialise
from mmdgs.noise import NoiseLevel, NoiseLevels

LEVEL_SCALE = 0.25
"""Brings log(sigma / alpha) near the other inputs (Karras et al., 2022, table 1)."""


class MLP(nn.Module):
    """A perceptron with Swish (SiLU) activations: x (B, inputs) -> (B, outputs).

    The authors' 2-D energy network is MLP(2, 2): four hidden layers of 400 units and two outputs
    that are summed to the energy. Their KL baseline is MLP(2, 4): two means and two log standard
    deviations. A conditional one is called as net(x, level) and has log(sigma / alpha) / 4 as one
    more input.
    """

    def __init__(
        self, inputs: int, outputs: int, *, width: int = 400, depth: int = 4,
        conditional: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if min(inputs, outputs, width, depth) < 1:
            sizes = f"{inputs=}, {outputs=}, {width=}, {depth=}"
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        self.conditional = conditional
        # An iterator: a file may declare any depth, and is refused while layers are built.
        widths = pairwise(chain([inputs + conditional], repeat(width, depth), [outputs]))
        with torch.device("meta"):
            layers = [nn.Linear(*ends) for ends in widths]
            pairs = ([nn.SiLU(), layer] for layer in layers[1:])
            self.layers = nn.Sequential(layers[0], *chain.from_iterable(pairs))
        initialise(self, seed)

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> Tensor:
        if not self.conditional:
            return self.layers(x)
        if level is None:
            raise ValueError("this network is conditional: call it as net(x, level)")
        ratio = level.sigma / level.alpha
        # Filled in on the device: a copy from the host would have it wait.
        ratio = ratio.to(x) if isinstance(ratio, Tensor) else x.new_full((), ratio)
        return self.layers(torch.cat([x, (LEVEL_SCALE * ratio.log()).expand(len(x), 1)], dim=1))


def _silu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(z)
    value, u = z * s, torch.addcmul(s, s, s, value=-1)  # u = s (1 - s)
    return value, torch.addcmul(s, z, u), torch.sub(z, value, alpha=2).add_(2).mul_(u)


def _tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t = torch.tanh(z)
    slope = 1 - t * t
    return t, slope, -2 * t * slope


ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    nn.SiLU: _silu,
    nn.Tanh: _tanh,
}
"""Activations with their value, slope and curvature."""


class PerceptronHessian:
    """The gradient and the Hessian of a perceptron's summed outputs, in closed form.

    With z_l = W_l a(z_{l-1}) + b_l, tangents T_l = dz_l/dx and g_l the gradient of the output in
    a(z_l),

        Hessian = sum_l T_l' diag(g_l a''(z_l)) T_l.

    So the tangents go forward with the value, as d more rows of one matrix product a layer, and one
    gradient comes back: two thirds of the work of differentiating twice, and a third of its
    overhead.
    """

    def __init__(self, linears: list[nn.Linear], activations: list[nn.Module]) -> None:
        self.linears = linears
        self.derivatives = [ACTIVATIONS[type(activation)] for activation in activations]

    @classmethod
    def of(cls, network: object) -> PerceptronHessian | None:
        """For an unconditional MLP, or nn.Sequential of linear layers and activations; else None.

        Only these very types and no hooks: a subclass or a hook may compute something else.
        """
        layers = network.layers if type(network) is MLP and not network.conditional else network
        if type(layers) is not nn.Sequential or len(layers) < 3 or len(layers) % 2 == 0:
            return None
        linears, activations = list(layers)[::2], list(layers)[1::2]
        plain = all(type(layer) is nn.Linear for layer in linears)
        known = all(type(activation) in ACTIVATIONS for activation in activations)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (network, layers, *layers))
        if hooked or not (plain and known):
            return None
        return cls(linears, activations)  # type: ignore[arg-type]

    def __call__(
        self, x: Float[Tensor, "batch d"]
    ) -> tuple[Float[Tensor, "batch d"], Float[Tensor, "batch d d"]]:
        # Not in bf16: autocast would round the products that the Hessian sums.
        with torch.autocast(x.device.type, enabled=False):
            return self._derived(x)

    def _derived(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, *rest = self.linears
        z, tangents = first(x), first.weight.mT[:, None, :].expand(-1, len(x), -1)  # (d, B, width)
        stages = []
        for layer, derivatives in zip(rest, self.derivatives, strict=True):
            value, slope, curvature = derivatives(z)
            stages.append((tangents, slope, curvature))
            if layer is not rest[-1]:
                joint = torch.cat([value[None], tangents * slope]) @ layer.weight.mT
                z, tangents = joint[0] if layer.bias is None else joint[0] + layer.bias, joint[1:]
        gradient = rest[-1].weight.sum(0).expand(len(x), -1)
        hessian = x.new_zeros(len(x), x.shape[1], x.shape[1])
        backward = zip(self.linears[-2::-1], reversed(stages), strict=True)
        for layer, (tangents, slope, curvature) in backward:
            weighted = tangents * (gradient * curvature)
            hessian.baddbmm_(weighted.transpose(0, 1), tangents.permute(1, 2, 0))
            gradient = (gradient * slope) @ layer.weight
        return gradient, hessian
