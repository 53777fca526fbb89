"""The shape annotations of the public functions, checked at run time over the library's main flow."""

from __future__ import annotations

import subprocess
import sys

import pytest

FLOW = """
from importlib.util import find_spec
from pathlib import Path

from jaxtyping import TypeCheckError, install_import_hook

# All modules but one: beartype cannot check the `Self` of a method. For good: most are imported when first used.
names = {path.stem for path in Path(find_spec("mmdgs").origin).parent.iterdir()} - {"__init__", "runtime"}
install_import_hook([f"mmdgs.{name}" for name in sorted(names)], "beartype.beartype")

import mmdgs
from mmdgs import data, losses, metrics, networks, training

import torch

torch.set_num_threads(1)
level, cleaner = mmdgs.NoiseLevel(alpha=0.9, sigma=0.4), mmdgs.NoiseLevel(sigma=0.1)
generator = torch.Generator().manual_seed(0)
d = 12
means = torch.linspace(-1, 1, 2 * d).reshape(2, d)

for covariances in (0.5, torch.full((2, d), 0.3), torch.eye(d).expand(2, d, d)):
    mixture = mmdgs.targets.GaussianMixture([0.5, 0.5], means, covariances)
    mixture.mean(), mixture.covariance(), mixture.covariances
    mixture.log_prob(mixture.sample((3, 4), generator=generator))
    for event in ((d,), (3, 2, 2)):
        x = mixture.sample((6,), generator=generator).reshape(6, *event)
        x_t = mmdgs.add_noise(x, level, generator=generator)
        mixture.score(x_t)
        posterior = mixture.posterior(x_t, level)
        posterior.mean, posterior.covariance
        posterior.log_prob(posterior.sample(generator=generator))
        posterior.sample((2, 3), generator=generator)
        denoiser = mixture.denoiser()
        estimators = (
            mmdgs.FullMoments(denoiser),
            mmdgs.DiagonalMoments(denoiser, probes=None),
            mmdgs.DiagonalMoments(denoiser, probes=3),
            mmdgs.KrylovMoments(denoiser, steps=3),
            mmdgs.IsotropicMoments.fit(denoiser, x, level, generator=generator),
            mmdgs.IsotropicMoments.fit(denoiser, x, [level, cleaner], generator=generator),
            mmdgs.LearnedMoments(lambda x_t: torch.cat([0.5 * x_t, torch.zeros_like(x_t)], dim=1)),
            mmdgs.ExactMoments(mixture),
        )
        for post in estimators:
            q = post(x_t, level, generator=generator)
            q.log_prob(q.sample(generator=generator))
            q.sample((2, 2), generator=generator)
            q.sample_with_info(generator=generator)
            q.variance_along(x_t), q.variance_along(torch.stack([x_t, x]))
            q.bridge(x_t, level, cleaner).sample(generator=generator)
            chain = mmdgs.gibbs_chain(post, x, level, steps=5, thin=2, progress=None)
            losses.kl(post, x, level, generator=generator)
        metrics.effective_sample_size(mmdgs.gibbs_chain(post, x, level, steps=5, progress=None))
        mmdgs.gibbs_chain(mmdgs.ExactGibbs(mixture), x, level, steps=2, seed=[1, 2, 3, 4, 5, 6], progress=None)
        losses.dsm(denoiser, x, level, generator=generator)

network = networks.MLP(2, 2, width=8, depth=2, seed=0)
mmdgs.networks.PerceptronHessian.of(network)(torch.zeros(3, 2))
energy = mmdgs.energy_denoiser(network)
toy = data.toy("rings")
points = toy.sample(100, 0)
settings = training.TrainingSettings(steps=3, batch_size=10)
training.train(network, lambda x, g: losses.dsm(energy, x, level, generator=g), points, settings, progress=None)
preconditioned = mmdgs.edm_denoiser(networks.MLP(2, 2, width=8, depth=2, conditional=True))
for name in ("uniform", "lognormal", "mixed"):
    drawn = training.level_draw(mmdgs.schedules.edm(5), name)(points, generator)
    for weighting in losses.WEIGHTINGS.values():
        losses.dsm(preconditioned, points, drawn, generator=generator, weighting=weighting)
heads = mmdgs.LearnedMoments(networks.MLP(2, 4, width=8, depth=2, conditional=True))
losses.kl(heads, points, drawn, generator=generator)
chain = mmdgs.gibbs_chain(mmdgs.FullMoments(energy), points[:4], level, steps=5, progress=None)
metrics.mmd(chain[-1], points)
metrics.mode_statistics(chain, points[:3])
toy.density().log_prob(points)

# The check must be at work, or all of the above has shown nothing.
try:
    metrics.mode_statistics(chain[0], points[:3])
except TypeCheckError:
    print("checked")
"""


@pytest.mark.slow
def test_annotations_hold_over_the_main_flow() -> None:
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", FLOW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "checked"
