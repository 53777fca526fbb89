"""The plane: the true posterior of a noisy point beside Gaussians (Figure 1), and chains that mix.

The denoiser is exact here, so what separates an approximation from the truth is its form alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.data.toys import toy
from mmdgs.errors import UsageError, unknown_name
from mmdgs.metrics import kl_divergence, mmd
from mmdgs.metrics.discrepancy import squared_distances
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn, seeded
from mmdgs.samplers import ExactGibbs, Kernel, run, single_level_plan
from mmdgs.studio import pictures
from mmdgs.studio.folder import bundle
from mmdgs.studio.pictures import GRID, LIMIT, VIEW, Captioned, figures, plane_picture
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell
from mmdgs.targets import GaussianMixture

Point = tuple[float, float]

NEGLIGIBLE = 1e-9
"""Weight of a posterior's component that is left out of pictures and sums."""
MAIN_SIDE, PANEL_SIDE = 480, 260
LEAST_SIGMA, MOST_SIGMA = 0.05, 1.0
FITTED_ON, START_STD = 4000, 0.1
MOST_CHAINS, MOST_STEPS = 2000, 1000
FORMS = {
    "full": "full covariance",
    "diagonal": "diagonal",
    "isotropic": "one variance for all points",
}
METHODS = {"exact": "exact Gibbs", **FORMS}
DENSITIES = {"mog": "four Gaussians", "rings": "two rings", "roll": "a spiral"}
PARTS = {
    "mog": ["left, below", "left, above", "right, above", "right, below"],
    "rings": ["outer ring", "inner ring"],
    "roll": ["inner third", "middle third", "outer third"],
}
"""The parts of each density whose weights chains must find: equal shares of its components."""
FIRST = ("mog", 0.3, (0.2, 0.1))
ABOUT = """A point was drawn from the blue density, and noise was added to it: it arrived at the
green cross. Where did it come from? **Click anywhere** to move the cross. The true answer,
p(x | noisy x), is a density of its own; a Gaussian (orange: half of it, and 95%) is what a
denoiser's derivative gives. KL says how far it is from the truth."""
CHAINS = """### Chains
Add noise, draw from the posterior, again and again: pseudo-Gibbs sampling of the density."""


@lru_cache(maxsize=8)
def mixture_of(name: str) -> GaussianMixture:
    """A density of the plane, in double precision."""
    return toy(name).density().to(dtype=torch.float64)


def level_of(sigma: float) -> NoiseLevel:
    """The level of a noise, within the studio's range."""
    if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
        raise UsageError(f"sigma must lie between {LEAST_SIGMA} and {MOST_SIGMA}, got {sigma}")
    return NoiseLevel(sigma)


@lru_cache(maxsize=64)
def estimator(name: str, method: str, sigma: float) -> Moments | Kernel:
    """What chains draw from: the true posterior, or an approximation from the exact denoiser."""
    density = mixture_of(name)
    if method == "exact":
        return ExactGibbs(density)
    if method == "full":
        return FullMoments(density.denoiser())
    if method == "diagonal":
        return DiagonalMoments(density.denoiser())
    if method == "isotropic":
        data, generator = toy(name).sample(FITTED_ON, 0).double(), seeded(0, "plane isotropic")
        return IsotropicMoments.fit(density.denoiser(), data, level_of(sigma), generator=generator)
    raise unknown_name("method", method, METHODS)


@dataclass(frozen=True)
class PointPosterior:
    """The posterior of a noisy point: its log density on the grid, Gaussians by form, their KL."""

    sigma: float
    point: Point
    log_true: Tensor
    gaussians: dict[str, MultivariateNormal]
    kl: dict[str, float]

    def panels(self) -> list[Captioned]:
        """The true posterior, and each approximation over it, with its KL divergence in words."""
        draw = functools.partial(plane_picture, self.log_true.exp(), PANEL_SIDE, at=self.point)
        panels = [("the true posterior", draw())]
        for form, gaussian in self.gaussians.items():
            ellipse = (gaussian.loc, gaussian.covariance_matrix)
            panels.append((f"{FORMS[form]}: KL {self.kl[form]:.3f} nats", draw(ellipse=ellipse)))
        return panels

    def files(self) -> dict[str, Any]:
        """A picture of all panels, and the arrays."""
        arrays: dict[str, Any] = {"sigma": self.sigma, "point": numpy.array(self.point)}
        arrays["log_true"] = self.log_true.reshape(GRID, GRID).numpy()
        for form, gaussian in self.gaussians.items():
            arrays[f"mean_{form}"] = gaussian.loc.numpy()
            arrays[f"covariance_{form}"] = gaussian.covariance_matrix.numpy()
            arrays[f"kl_{form}"] = self.kl[form]
        picture = numpy.concatenate([picture for _, picture in self.panels()], 1)
        return {"plane.png": picture, "plane.npz": arrays}


def look(density: str, sigma: float, point: Point) -> PointPosterior:
    """The true posterior of a noisy point, and Gaussians with their KL divergence in nats."""
    level = level_of(sigma)
    if not all(abs(value) <= VIEW for value in point):
        bounds = f"-{VIEW:g} and {VIEW:g}"
        raise UsageError(f"both numbers of the point must lie between {bounds}, got {point}")
    x_t = torch.tensor([point], dtype=torch.float64)
    grid, cell = pictures.plane_grid()
    true = mixture_of(density).posterior(x_t, level).mixture(0)
    counts = true.weights > NEGLIGIBLE  # along a curve a few of 400
    weights = true.weights[counts] / true.weights[counts].sum()
    log_true = GaussianMixture(weights, true.means[counts], true.values[counts]).log_prob(grid)
    gaussians = {}
    for form in FORMS:
        moments: Any = estimator(density, form, sigma)
        q = moments(x_t, level)
        gaussians[form] = MultivariateNormal(q.mean[0].detach(), q.cov.dense()[0].detach())
    kl = {form: kl_divergence(log_true, q.log_prob(grid), cell) for form, q in gaussians.items()}
    return PointPosterior(sigma, point, log_true, gaussians, kl)


@lru_cache(maxsize=8)
def _density(name: str) -> Tensor:
    """The clean density on the grid."""
    return mixture_of(name).log_prob(pictures.plane_grid()[0]).exp()


def main_picture(
    name: str, point: Point | None = None, dots: Tensor | None = None
) -> numpy.ndarray:
    """The clean density, with the noisy point or chains over it."""
    return plane_picture(_density(name), MAIN_SIDE, dots, point)


def clicked(index: Point) -> Point:
    """The point of the plane at a pixel of the main picture."""
    x, y = (min(max(2 * pixel / MAIN_SIDE - 1, -1), 1) * VIEW for pixel in index)
    return round(x, 3), round(-y, 3)


@dataclass(frozen=True)
class Chains:
    """Chains (n, 2) after some steps, (part, share, right share) of the density, and their MMD."""

    density: str
    step: int
    x: Tensor
    shares: list[tuple[str, float, float]]
    mmd: float

    def files(self) -> dict[str, Any]:
        """A picture of the chains over the density, and the arrays."""
        shares = numpy.array([share for _, share, _ in self.shares])
        arrays = {"x": self.x.numpy(), "shares": shares, "mmd": self.mmd}
        return {"chains.png": main_picture(self.density, dots=self.x), "chains.npz": arrays}


def run_chains(
    density: str,
    sigma: float,
    method: str,
    chains: int = 300,
    steps: int = 200,
    seed: int = 0,
    tell: Tell[Chains] = QUIET,
) -> Chains:
    """Run pseudo-Gibbs chains at one level, from within 0.1 of one point as the authors do."""
    for name, value, most in (("chains", chains, MOST_CHAINS), ("steps", steps, MOST_STEPS)):
        if not 1 <= value <= most:
            raise UsageError(f"{name} must lie between 1 and {most:,}, got {value}")
    level, points = level_of(sigma), toy(density)
    data = points.sample(chains, seed).double()
    streams = Streams(seed, chains, purpose="start")
    noise = randn((chains, 2), torch.empty(0, dtype=torch.float64), streams)
    start = torch.tensor(points.start, dtype=torch.float64) + START_STD * noise

    def state(step: int, x: Tensor) -> Chains:
        return Chains(density, step, x, shares(density, x), mmd(x, data))

    def note(step: int, now: Any, info: Any) -> None:
        if tell.due():
            tell(state(step + 1, now.x))

    tell(state(0, start))
    plan = single_level_plan(estimator(density, method, sigma), level, steps=steps)
    return state(steps, run(plan, start, seed=seed, callback=note, progress=None).x)


def shares(density: str, x: Tensor) -> list[tuple[str, float, float]]:
    """The share of points in each part of a density, by the nearest component; the right one."""
    law, names = mixture_of(density), PARTS[density]
    part = torch.arange(len(law.means)) * len(names) // len(law.means)
    nearest = part[squared_distances(x, law.means).argmin(1)]
    right = torch.zeros(len(names), dtype=torch.float64).index_add(0, part, law.weights)
    held = (nearest == torch.arange(len(names))[:, None]).double().mean(1)
    return list(zip(names, held.tolist(), right.tolist(), strict=True))


def look_lines(density: str, sigma: float, point: Point) -> tuple[str, str]:
    """The Python lines and the command for `look`."""
    x, y = point
    python = f"""import torch
import mmdgs

density = mmdgs.data.toy("{density}").density().to(dtype=torch.float64)
level, x_t = mmdgs.NoiseLevel({sigma:g}), torch.tensor([[{x:g}, {y:g}]], dtype=torch.float64)
true = density.posterior(x_t, level)                     # exact: a mixture
q = mmdgs.FullMoments(density.denoiser())(x_t, level)    # Theorem 2; or DiagonalMoments

line = torch.linspace(-{LIMIT:g}, {LIMIT:g}, {GRID}, dtype=torch.float64)
grid, cell = torch.cartesian_prod(line, line), (line[1] - line[0]).item() ** 2
near = torch.distributions.MultivariateNormal(q.mean[0], q.cov.dense()[0])
kl = mmdgs.metrics.kl_divergence(true.mixture(0).log_prob(grid), near.log_prob(grid), cell)
print(q.mean, q.cov.dense(), kl)"""
    return python, f"mmdgs plane {density} --sigma {sigma:g} --at {x:g},{y:g} --out plane"


def chain_lines(
    density: str, sigma: float, method: str, chains: int, steps: int, seed: int
) -> tuple[str, str]:
    """The Python lines and the command for `run_chains`."""
    law = {
        "exact": "mmdgs.samplers.ExactGibbs(density)",
        "full": "mmdgs.FullMoments(density.denoiser())",
        "diagonal": "mmdgs.DiagonalMoments(density.denoiser())",
        "isotropic": f"""mmdgs.IsotropicMoments.fit(
    density.denoiser(), toy.sample({FITTED_ON}, 0).double(), level,
    generator=seeded(0, "plane isotropic"),
)""",
    }[method]
    more = ", seeded" if method == "isotropic" else ""
    python = f"""import torch
import mmdgs
from mmdgs.randomness import Streams, randn{more}

toy, level = mmdgs.data.toy("{density}"), mmdgs.NoiseLevel({sigma:g})
density = toy.density().to(dtype=torch.float64)
law = {law}
streams = Streams({seed}, {chains}, purpose="start")
noise = randn(({chains}, 2), torch.empty(0, dtype=torch.float64), streams)
start = torch.tensor(toy.start, dtype=torch.float64) + {START_STD:g} * noise
x = mmdgs.gibbs_chain(law, start, level, steps={steps}, seed={seed})[-1]
print(mmdgs.metrics.mmd(x, toy.sample({chains}, {seed}).double()))"""
    command = f"mmdgs plane {density} --sigma {sigma:g} --method {method} --chains {chains}"
    return python, f"{command} --steps {steps} --seed {seed} --out plane"


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""
    name, first_sigma, point = FIRST
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            options = {"format": "png", "image_mode": "RGBA", "interactive": False, "buttons": []}
            options |= {"label": "Click a noisy point", "elem_classes": "mm-plane"}
            picture = room.place(gr.Image, "picture", main_picture(name, point), **options)
        with gr.Column(scale=3, min_width=300):
            with gr.Row():
                density = room.menu("density", "Density", DENSITIES, min_width=180)
                sigma = room.slider(
                    "sigma", "Noise (sigma)", LEAST_SIGMA, MOST_SIGMA, first_sigma, 0.05
                )
            with gr.Row():
                options = {"step": 0.1, "min_width": 100}
                x = room.place(gr.Number, "x", point[0], label="Noisy point: x", **options)
                y = room.place(gr.Number, "y", point[1], label="y", **options)
            panels = room.place(gr.HTML, "panels", figures(look(*FIRST).panels(), wide=True))
    gr.Markdown(CHAINS)
    with gr.Row():
        room.menu("method", "Draw from", METHODS, value="full", min_width=180)
        room.slider("chains", "Chains", 50, 900, 300, 50)
        room.slider("steps", "Steps", 10, 900, 200, 10)
        room.seed()
    room.buttons("Run chains")
    room.status_line()
    weights = room.place(gr.HTML, "weights")
    room.lines_boxes(*look_lines(*FIRST))

    def shown(density: str, sigma: float, x: float, y: float) -> Changes:
        point = (round(float(x or 0), 4), round(float(y or 0), 4))
        posterior = look(density, float(sigma), point)
        return {
            picture: main_picture(density, point),
            panels: figures(posterior.panels(), wide=True),
            **room.lines(look_lines(density, float(sigma), point)),
            **room.ready("plane.zip", bundle("plane", posterior.files())),
        }

    def click(index: Point, density: str, sigma: float) -> Changes:
        at = clicked(index)
        return {x: at[0], y: at[1], **shown(density, sigma, *at)}

    def prepare(**values: Any) -> Run:
        def change(chains: Chains) -> Changes:
            changes: Changes = {picture: main_picture(chains.density, dots=chains.x)}
            changes |= {weights: pictures.bars(chains.shares)}
            where = f"Step {chains.step} of {values['steps']}"
            changes[room.status] = (
                f"{where}, MMD {chains.mmd:.4f} (0: the chains are like fresh data)."
            )
            return changes

        def saved(chains: Chains) -> tuple[str, bytes]:
            return "chains.zip", bundle("chains", chains.files())

        lines = chain_lines(**values)
        return Run(lambda tell: run_chains(**values, tell=tell), change, saved, lines)

    point_controls = [density, sigma, x, y]
    shown_in = [picture, panels, room.python, room.command, room.download]
    room.clicks(picture, click, [density, sigma], [x, y, *shown_in])
    changed = [density.change, sigma.change]
    room.on(changed, shown, point_controls, shown_in, trigger_mode="always_last")
    for number in (x, y):
        room.on([number.submit], shown, point_controls, shown_in, api_name="look")
        room.on([number.blur], shown, point_controls, shown_in)
    room.runs(prepare, [picture, weights])
