"""The plane: the true posterior of a noisy point beside its Gaussian approximations (Figure 1), and chains that mix.

The denoiser is exact here, so what separates an approximation from the truth is its form alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.data.pictures import png
from mmdgs.data.toys import TOYS, Toy, toy
from mmdgs.errors import UsageError, unknown_name
from mmdgs.metrics import kl_divergence, mmd
from mmdgs.metrics.discrepancy import squared_distances
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn, seeded
from mmdgs.samplers import ExactGibbs, Kernel, run, single_level_plan
from mmdgs.studio.downloads import npz
from mmdgs.studio.pictures import plane_picture, square_grid
from mmdgs.targets import GaussianMixture

LIMIT, GRID = 2.4, 145
"""The grid, in cells of 1/30: at most one standard deviation of the narrowest posterior, where sums are exact."""
FARTHEST = 2.0
"""Noisy points beyond it have posteriors that the grid does not hold; pictures end there."""
NEGLIGIBLE = 1e-9
"""Weight of a posterior's component that is left out of pictures and sums."""
MAIN_SIDE, PANEL_SIDE = 480, 260
LEAST_SIGMA, MOST_SIGMA = 0.05, 1.0
FITTED_ON, START_STD = 4000, 0.1
EXACT = "exact"
FORMS = {"full": "full covariance", "diagonal": "diagonal", "isotropic": "one variance for all points"}
METHODS = {EXACT: "exact Gibbs", **FORMS}
DENSITIES = {"mog": "four Gaussians", "rings": "two rings", "roll": "a spiral"}
PARTS = {"mog": ["left, below", "left, above", "right, above", "right, below"], "rings": ["outer ring", "inner ring"]}
PARTS["roll"] = ["inner third", "middle third", "outer third"]
"""The parts of each density whose weights chains must find: equal shares of its components, in order."""
MOST_CHAINS, MOST_STEPS = 2000, 1000


@lru_cache(maxsize=8)
def mixture_of(name: str) -> GaussianMixture:
    """A density of the plane, in double precision."""
    return _toy(name).density().to(dtype=torch.float64)


def _toy(name: str) -> Toy:
    if name not in TOYS:
        raise unknown_name("density", name, TOYS)
    return toy(name)


def level_of(sigma: float) -> NoiseLevel:
    """The level of a noise, within the studio's range."""
    if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
        raise UsageError(f"sigma must lie between {LEAST_SIGMA} and {MOST_SIGMA}, got {sigma}")
    return NoiseLevel(sigma)


@lru_cache(maxsize=64)
def estimator(name: str, form: str, sigma: float) -> Moments:
    """A Gaussian approximation by its form, from the exact denoiser."""
    denoiser = mixture_of(name).denoiser()
    if form == "full":
        return FullMoments(denoiser)
    if form == "diagonal":
        return DiagonalMoments(denoiser)
    if form == "isotropic":
        data = _toy(name).sample(FITTED_ON, 0).double()
        return IsotropicMoments.fit(denoiser, data, level_of(sigma), generator=seeded(0, "plane isotropic"))
    raise unknown_name("approximation", form, FORMS)


@dataclass(frozen=True)
class Seen:
    """The posterior of a noisy point: log densities on the grid, and each approximation's mean, covariance and KL."""

    name: str
    sigma: float
    point: tuple[float, float]
    log_true: Tensor
    means: dict[str, Tensor]
    covariances: dict[str, Tensor]
    kl: dict[str, float]

    def panels(self) -> list[tuple[str, numpy.ndarray]]:
        """The true posterior, and each approximation over it, with its KL divergence in words."""
        density = self.log_true.exp()
        found = [("the true posterior", plane_picture(density, LIMIT, PANEL_SIDE, view=FARTHEST, at=self.point))]
        for form, words in FORMS.items():
            drawn = plane_picture(
                density,
                LIMIT,
                PANEL_SIDE,
                view=FARTHEST,
                at=self.point,
                ellipse=(self.means[form], self.covariances[form]),
            )
            found.append((f"{words}: KL {self.kl[form]:.3f} nats", drawn))
        return found

    def arrays(self) -> dict[str, Any]:
        """Means, covariances and divergences by name, for a file."""
        found: dict[str, Any] = {"sigma": self.sigma, "point": numpy.array(self.point)}
        found["log_true"] = self.log_true.reshape(GRID, GRID).numpy()
        for form in FORMS:
            found |= {f"mean_{form}": self.means[form].numpy(), f"covariance_{form}": self.covariances[form].numpy()}
            found[f"kl_{form}"] = self.kl[form]
        return found

    def files(self) -> dict[str, bytes]:
        """A picture of all panels, and the arrays."""
        return {
            "plane.png": png(numpy.concatenate([one for _, one in self.panels()], 1)),
            "plane.npz": npz(self.arrays()),
        }


def look(name: str, sigma: float, point: tuple[float, float]) -> Seen:
    """The true posterior of a noisy point, and the approximations with their divergences from it, in nats."""
    level = level_of(sigma)
    if not all(abs(one) <= FARTHEST for one in point):
        raise UsageError(f"both numbers of the point must lie between -{FARTHEST:g} and {FARTHEST:g}, got {point}")
    x_t = torch.tensor([point], dtype=torch.float64)
    where, cell = square_grid(LIMIT, GRID)
    log_true = _without_negligible(mixture_of(name).posterior(x_t, level).mixture(0)).log_prob(where)
    means, covariances, kl = {}, {}, {}
    for form in FORMS:
        q = estimator(name, form, sigma)(x_t, level)
        means[form], covariances[form] = q.mean[0].detach(), q.cov.dense()[0].detach()
        law = MultivariateNormal(means[form], covariances[form])
        kl[form] = kl_divergence(log_true, law.log_prob(where), cell)
    return Seen(name, sigma, point, log_true, means, covariances, kl)


def _without_negligible(law: GaussianMixture) -> GaussianMixture:
    """A mixture of round components without those that weigh nothing: most of 400, for a posterior along a curve."""
    counts = law.weights > NEGLIGIBLE
    return GaussianMixture(law.weights[counts] / law.weights[counts].sum(), law.means[counts], law.values[counts])


@lru_cache(maxsize=8)
def _density(name: str) -> Tensor:
    """The clean density on the grid."""
    where, _ = square_grid(LIMIT, GRID)
    return mixture_of(name).log_prob(where).exp()


def main_picture(name: str, point: tuple[float, float] | None = None, dots: Tensor | None = None) -> numpy.ndarray:
    """The clean density, with the noisy point or chains over it."""
    return plane_picture(_density(name), LIMIT, MAIN_SIDE, view=FARTHEST, at=point, dots=dots)


def clicked(index: tuple[float, float]) -> tuple[float, float]:
    """The point of the plane at a pixel of the main picture."""
    x, y = (min(max(2 * one / MAIN_SIDE - 1, -1), 1) * FARTHEST for one in index)
    return round(x, 3), round(-y, 3)


@dataclass(frozen=True)
class Mixed:
    """Chains after some steps: where they are (chains, 2), the share in each part of the density, and their MMD."""

    name: str
    step: int
    x: Tensor
    shares: list[tuple[str, float, float]]
    mmd: float

    def files(self) -> dict[str, bytes]:
        """A picture of the chains over the density, and the arrays."""
        arrays = {"x": self.x.numpy(), "shares": numpy.array([one for _, one, _ in self.shares]), "mmd": self.mmd}
        return {"chains.png": png(main_picture(self.name, dots=self.x)), "chains.npz": npz(arrays)}


def chain_kernel(name: str, method: str, sigma: float) -> Moments | Kernel:
    """What chains draw from: the true posterior, or an approximation."""
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return ExactGibbs(mixture_of(name)) if method == EXACT else estimator(name, method, sigma)


def starts(name: str, chains: int, seed: int) -> Tensor:
    """Where the authors start their chains: within 0.1 of one point."""
    noise = randn((chains, 2), torch.empty(0, dtype=torch.float64), Streams(seed, chains, purpose="start"))
    return torch.tensor(_toy(name).start, dtype=torch.float64) + START_STD * noise


def chains(
    name: str,
    method: str,
    sigma: float,
    *,
    count: int = 300,
    steps: int = 200,
    seed: int = 0,
    tell: Callable[[Mixed], Any] = lambda found: None,
    due: Callable[[], bool] = lambda: False,
) -> Mixed:
    """Run pseudo-Gibbs chains at one level; `tell` hears of their state whenever `due`."""
    for what, value, most in (("chains", count, MOST_CHAINS), ("steps", steps, MOST_STEPS)):
        if not 1 <= value <= most:
            raise UsageError(f"{what} must lie between 1 and {most:,}, got {value}")
    level, law = level_of(sigma), mixture_of(name)
    data = _toy(name).sample(count, seed).double()
    x0 = starts(name, count, seed)

    def state(step: int, x: Tensor) -> Mixed:
        return Mixed(name, step, x, shares(name, law, x), mmd(x, data))

    def note(step: int, now: Any, info: Any) -> None:
        if due():
            tell(state(step + 1, now.x))

    tell(state(0, x0))
    plan = single_level_plan(chain_kernel(name, method, sigma), level, steps=steps)
    found = run(plan, x0, seed=seed, callback=note, progress=None)
    return state(steps, found.x)


def shares(name: str, law: GaussianMixture, x: Tensor) -> list[tuple[str, float, float]]:
    """The share of points in each part of a density, by the nearest component, and the right share."""
    names = PARTS[name]
    part = torch.arange(len(law.means)) * len(names) // len(law.means)
    nearest = part[squared_distances(x, law.means).argmin(1)]
    right = torch.zeros(len(names), dtype=torch.float64).index_add(0, part, law.weights)
    return [(one, (nearest == i).double().mean().item(), right[i].item()) for i, one in enumerate(names)]


def look_lines(name: str, sigma: float, point: tuple[float, float]) -> tuple[str, str]:
    """The Python lines and the command for `look`."""
    x, y = point
    python = f"""import torch
import mmdgs

density = mmdgs.data.toy("{name}").density().to(dtype=torch.float64)
level, x_t = mmdgs.NoiseLevel({sigma:g}), torch.tensor([[{x:g}, {y:g}]], dtype=torch.float64)
true = density.posterior(x_t, level)                     # exact: a mixture
q = mmdgs.FullMoments(density.denoiser())(x_t, level)    # or DiagonalMoments: the Gaussian by Theorem 2

line = torch.linspace(-{LIMIT:g}, {LIMIT:g}, {GRID}, dtype=torch.float64)
grid, cell = torch.cartesian_prod(line, line), (line[1] - line[0]).item() ** 2
near = torch.distributions.MultivariateNormal(q.mean[0], q.cov.dense()[0])
kl = mmdgs.metrics.kl_divergence(true.mixture(0).log_prob(grid), near.log_prob(grid), cell)
print(q.mean, q.cov.dense(), kl)"""
    return python, f"mmdgs plane {name} --sigma {sigma:g} --at {x:g},{y:g} --out plane"


def chain_lines(name: str, method: str, sigma: float, count: int, steps: int, seed: int) -> tuple[str, str]:
    """The Python lines and the command for `chains`."""
    made = {
        EXACT: "mmdgs.ExactGibbs(density)",
        "full": "mmdgs.FullMoments(density.denoiser())",
        "diagonal": "mmdgs.DiagonalMoments(density.denoiser())",
        "isotropic": f"""mmdgs.IsotropicMoments.fit(
    density.denoiser(), toy.sample({FITTED_ON}, 0).double(), level, generator=seeded(0, "plane isotropic")
)""",
    }[method]
    more = ", seeded" if method == "isotropic" else ""
    python = f"""import torch
import mmdgs
from mmdgs.randomness import Streams, randn{more}

toy, level = mmdgs.data.toy("{name}"), mmdgs.NoiseLevel({sigma:g})
density = toy.density().to(dtype=torch.float64)
law = {made}
noise = randn(({count}, 2), torch.empty(0, dtype=torch.float64), Streams({seed}, {count}, purpose="start"))
start = torch.tensor(toy.start, dtype=torch.float64) + {START_STD:g} * noise
x = mmdgs.gibbs_chain(law, start, level, steps={steps}, seed={seed})[-1]
print(mmdgs.metrics.mmd(x, toy.sample({count}, {seed}).double()))"""
    command = f"mmdgs plane {name} --sigma {sigma:g} --method {method} --chains {count} --steps {steps} --seed {seed}"
    return python, f"{command} --out plane"
