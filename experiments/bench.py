"""Benchmarks of whole methods against plain ones, for docs/results: `python -m experiments.bench`.

    python -m experiments.bench chains
    python -m experiments.bench sampler --model google/ddpm-cifar10-32 --precision bf16
    python -m experiments.bench restore --operator sr:4

The smaller ones are `mmdgs bench chain` and `mmdgs bench moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from mmdgs.bench import (
    CHAIN_STEPS,
    REPEATS,
    Row,
    Work,
    awake,
    kind_of,
    measure,
    our_way,
    plain_moments,
    timed,
)
from mmdgs.cli.app import App, Device, Quiet, device_named
from mmdgs.cli.bench import AsJson, Batch, Quick, show_rows
from mmdgs.denoisers import Denoiser, energy_denoiser
from mmdgs.errors import UsageError
from mmdgs.metrics import psnr
from mmdgs.models import Model, load
from mmdgs.moments import FLOOR, DiagonalMoments, FullMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.operators.named import parse_operator
from mmdgs.randomness import Generator, randn_like, seeded
from mmdgs.restoration.draws import restore
from mmdgs.restoration.folder import simulated
from mmdgs.runtime import check_precision
from mmdgs.samplers import gibbs_chain, gibbs_plan, run
from mmdgs.sampling import SamplerSettings, generate
from mmdgs.sampling.named import exploding_levels
from mmdgs.training.recipe import Recipe
from mmdgs.training.untrained import new_model

app = App(help=__doc__)


def batched_chain(
    energy: nn.Module, x: Tensor, steps: int, sigma: float, generator: torch.Generator
) -> Tensor:
    """Many Gibbs chains at once, x (chains, d): the last states, by ten lines of autograd."""
    eye = torch.eye(x.shape[1], device=x.device)
    normal = partial(torch.randn, x.shape, generator=generator, device=generator.device)
    for _ in range(steps):
        noisy = x + sigma * normal().to(x.device)
        point = noisy.requires_grad_(True)
        (gradient,) = torch.autograd.grad(energy(point).sum(), point, create_graph=True)
        parts = gradient.unbind(1)
        rows = [torch.autograd.grad(part.sum(), point, retain_graph=True)[0] for part in parts]
        covariance = sigma**2 * eye - sigma**4 * torch.stack(rows, 1)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed.any():
            root = torch.linalg.cholesky(covariance + 0.01 * eye * (failed > 0)[:, None, None])
        z = normal().to(x.device)
        x = (noisy - sigma**2 * gradient + (root @ z[..., None])[..., 0]).detach()
    return x


@app.command()
def chains(
    device: Device = "auto", quick: Quick = False, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """1,000 chains in 2-D, full covariance, beside ten lines of batched autograd."""
    where, level, count = device_named(device), NoiseLevel(sigma=0.2), 1000
    steps = CHAIN_STEPS[kind_of(where)][count] // (10 if quick else 1)
    energy, x0 = MLP(2, 2, seed=0).to(where), torch.ones(count, 2, device=where)
    moments = FullMoments(energy_denoiser(energy))
    plain = partial(batched_chain, energy, x0, steps, level.sigma, seeded(0))
    ours = partial(gibbs_chain, moments, x0, level, steps=steps, progress=None)
    base, own = measure([Work(call, count * steps) for call in (plain, ours)], where)
    label = f"2-D full covariance, {count:,} chains, {steps:,} steps, batched autograd"
    show_rows([Row.of(label, "chain-steps/s", base, own)], where, as_json)


def plain_gibbs(
    denoiser: Denoiser,
    x: Tensor,
    levels: Sequence[NoiseLevel],
    sweeps: int,
    probes: int,
    generator: Generator,
) -> Tensor:
    """The paper's Algorithm 2 at levels with alpha = 1. A sweep at the pair (t, s) is

    x_t = x_s + b e,   b^2 = sigma_t^2 - sigma_s^2,   g = b^2 / sigma_t^2
    x_s = g D(x_t) + (1 - g) x_t + sqrt(g^2 C + sigma_s^2 g) e
    """
    for level, following in pairwise(levels):
        b = (level.sigma**2 - following.sigma**2) ** 0.5
        gain = b**2 / level.sigma**2
        for _ in range(sweeps):
            x_t = x + b * randn_like(x, generator)
            mean, variances = plain_moments(denoiser, x_t, level, probes, generator)
            spread = (gain**2 * variances + following.sigma**2 * gain).sqrt()
            x = gain * mean + (1 - gain) * x_t + spread * randn_like(x, generator)
    with torch.no_grad():
        return denoiser(x, levels[-1])


SAMPLED = {"cuda": ("unet-paper", (3, 32, 32), 100), "cpu": ("unet-tiny", (1, 16, 16), 4)}
"""Where no model is named: a preset with random weights, the shape of its images, and the batch."""


def random_model(name: str, shape: tuple[int, int, int]) -> Model:
    """A network of many levels with random weights."""
    model = new_model(Recipe(model=name, param="edm", levels="geometric:100:50:0.01"), shape)
    awake(model.network)
    return model


@app.command()
def sampler(
    model: Annotated[str, typer.Option(help="A pretrained model, else random weights.")] = "",
    levels_count: Annotated[int, typer.Option(min=2, help="How many noise levels.")] = 4,
    sweeps: Annotated[int, typer.Option(min=1, help="Sweeps at each pair of levels.")] = 3,
    probes: Annotated[int, typer.Option(min=1, help="Probes of the diagonal.")] = 3,
    batch: Batch = None,
    precision: Annotated[str, typer.Option(help="Ours: float32, tf32 or bf16.")] = "float32",
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Seconds of an image's step in the paper's Algorithm 2, beside a plain float32 loop."""
    check_precision(precision)
    where = device_named(device)
    name, shape, usual = SAMPLED[kind_of(where)]
    network = (load(model) if model else random_model(name, shape)).to(where)
    if len(network.levels) < 2:
        raise UsageError(f"{model!r} was trained at one noise level; Gibbs needs a model of many")
    count = batch or usual
    levels = exploding_levels(network, 2 if quick else levels_count)
    moments = DiagonalMoments(network, probes=probes, floor=FLOOR, design=Rademacher())
    plan = gibbs_plan(moments, levels, sweeps=sweeps)
    x0 = plan.noise(network.shape, count, generator=seeded(1)).to(where)

    def ours() -> None:
        with our_way(precision, where):
            run(plan, x0, progress=None)

    plain = partial(plain_gibbs, network, x0, levels, sweeps, probes, seeded(0, device=where))
    steps = count * sweeps * (len(levels) - 1)
    base, own = measure([Work(plain, steps), Work(ours, steps)], where, 1 if quick else REPEATS)
    what = f"{model or f'{name}, random'}, {'x'.join(map(str, network.shape))}, batch {count}"
    label = f"Gibbs, {what}, {len(levels)} levels, {sweeps} sweeps, {probes} probes"
    show_rows([Row.of(label, "s/image-step", base, own, precision=precision)], where, as_json)


STEPS = 25
"""Those of `mmdgs.restore`."""


@app.command("restore")
def restoration(
    model: Annotated[str, typer.Option(help="A pretrained model.")] = "cifar10",
    operator: Annotated[str, typer.Option(help="As of `mmdgs restore`.")] = "sr:4",
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise.")] = 0.05,
    images: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Seconds of a draw and PSNR of `mmdgs.restore`, beside deepinv's moment matching.

    Both have their library's own settings and numbers of steps. The truth are samples of the
    network itself (Heun), so that its prior is right and no data are needed.
    """
    from experiments import rivals
    from mmdgs.lazy import optional

    optional("deepinv")
    where = device_named(device)
    network = load(model).to(where)
    forward = parse_operator(operator, network.shape)
    heun = SamplerSettings(sampler="heun", steps=6 if quick else None)
    truth = generate(network, heun, images, progress="drawing truth").x
    assert truth is not None  # not written to files
    y = simulated(truth.clamp(0, 1).to(where), forward, noise, seed=0)
    cost: dict[str, float] = {}

    def theirs(steps: int) -> Tensor:
        draws, cost["theirs"] = rivals.restore(
            rivals.MATCHING, network, y, forward, noise, steps, batch_size=images
        )
        return draws

    def ours(steps: int) -> Tensor:
        done = restore(
            network, y, forward, noise=noise, steps=steps, draws=1, batch_size=images, progress=None
        )
        cost["ours"] = done.cost.evaluations
        return done.draws

    def measured(call: Callable[[int], Tensor], steps: int) -> tuple[float, int | None, float]:
        call(3)  # warms up
        draws: list[Tensor] = []
        seconds, memory = timed(lambda: draws.append(call(steps)), where)
        quality = psnr(draws[0].cpu().clamp(0, 1), truth.cpu()).mean().item()
        return seconds / images, memory, quality

    counts = (3, 3) if quick else (rivals.STEPS[rivals.MATCHING], STEPS)
    plain, plain_memory, plain_psnr = measured(theirs, counts[0])
    own, memory, own_psnr = measured(ours, counts[1])
    name = (
        f"{model}, {operator}, noise {noise:g}, {images} images: deepinv's moment matching, "
        f"{counts[0]} steps, {cost['theirs']:g} evaluations, against restore, {counts[1]} "
        f"steps, {cost['ours']:g} evaluations; PSNR {plain_psnr:.3g} and {own_psnr:.3g} dB"
    )
    row = Row(name, "s/draw", plain, own, plain_memory=plain_memory, memory=memory)
    show_rows([row], where, as_json)


if __name__ == "__main__":
    app()
