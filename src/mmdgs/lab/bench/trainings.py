"""`mmdgs bench train`: images a second of denoising score matching, against a plain loop.

The plain loop is float32 without torch.compile: draw noise, one forward pass (for an energy a gradient inside),
one backward pass, Adam. Ours is the engine that `mmdgs train` runs: dequantisation, noise from per-example
streams, moving average and all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.lab.bench.timing import Row, Work, measure, row
from mmdgs.models import Model
from mmdgs.randomness import seeded
from mmdgs.training import ImageExamples, Recipe, Trainer, TrainingSettings, loss_of, new_model
from mmdgs.training.objective import PerExampleLoss
from mmdgs.training.run import placed

SIGMA = 0.3
IMAGES = 2_048


@dataclass(frozen=True)
class Size:
    """What is trained: a preset on images of some shape, and how many steps a measurement takes."""

    model: str
    shape: tuple[int, int, int]
    batch_size: int
    steps: int
    precision: str


ON_GPU = Size("unet-paper", (3, 32, 32), 512, 6, "bf16")
ON_CPU = Size("unet-small", (1, 28, 28), 16, 2, "float32")


def plain_steps(model: Model, images: Tensor, batch_size: int, steps: int) -> float:
    """DSM training steps as one writes them down first; returns the last loss."""
    network, sigma = model.network.train(), model.level.sigma
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)
    generator = seeded(0, device=images.device)
    value = torch.zeros(())
    for step in range(steps):
        first = step * batch_size % (len(images) - batch_size + 1)
        batch = images[first : first + batch_size].float()
        x = (batch + torch.rand(batch.shape, generator=generator, device=batch.device)) / 256
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        x_t = x + sigma * noise
        if model.config.param == "energy":
            x_t.requires_grad_(True)
            score = -torch.autograd.grad(network(x_t).sum(), x_t, create_graph=True)[0]
        else:
            score = network(x_t)
        value = 0.5 * (score + noise / sigma).square().flatten(1).sum(1).mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    return value.item()


def train(device: torch.device, *, quick: bool = False) -> list[Row]:
    """Images a second for the score and the energy form of a U-Net: the paper's on a GPU, the small one on a CPU."""
    size = ON_GPU if device.type == "cuda" else ON_CPU
    images = torch.randint(0, 256, (IMAGES, *size.shape), generator=seeded(0)).byte().to(device)
    steps = max(1, size.steps // (5 if quick else 1))
    rows = []
    for param in ("score", "energy"):
        settings = TrainingSettings(
            steps=steps, batch_size=size.batch_size, ema=0.999, precision=size.precision, checkpoint_every=None
        )
        recipe = Recipe(model=size.model, param=param, sigma=SIGMA, network={"dropout": 0.0}, training=settings)
        plain_model = new_model(recipe, size.shape).to(device)
        model = placed(new_model(recipe, size.shape), device)
        loss = loss_of(model, compiled=device.type == "cuda")

        def ours(model: Model = model, loss: PerExampleLoss = loss, settings: TrainingSettings = settings) -> None:
            Trainer(model.network, loss, ImageExamples(images), settings).run(None)

        def plain(model: Model = plain_model, steps: int = steps) -> None:
            plain_steps(model, images, size.batch_size, steps)

        units = size.batch_size * steps
        base, found = measure([Work(plain, units), Work(ours, units)], device, repeats=1 if quick else 3)
        name = f"DSM, {param}, {size.model}, {'x'.join(map(str, size.shape))}, batch {size.batch_size}"
        rows.append(row(name, "images/s", base, found, precision=size.precision))
    return rows
