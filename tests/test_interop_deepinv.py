"""Guests of deepinv, against closed forms and deepinv's own moment matching."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import INTEROP, blocks_of
from torch import Tensor, nn
from toy_models import stand_in_model
from typer.testing import CliRunner

import mmdgs
from experiments import rivals
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.moments import FullMoments
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Box, Downsample, as_operator
from mmdgs.randomness import seeded
from mmdgs.schedules import geometric

SHAPE = (1, 4, 4)
D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:deepinv"),
]


for library in ("torchvision", "deepinv"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(
            f"{library} is not installed: pip install mmdgs[deepinv]", allow_module_level=True
        )
deepinv = rivals.load_deepinv()

from mmdgs.interop.deepinv import CovarianceFidelity, Restorer, to_deepinv, to_physics  # noqa: E402


def covariance() -> Tensor:
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    return 0.02 * (-0.5 * (torch.cdist(places, places) / 1.5).square()).exp() + 0.002 * torch.eye(D)


def gaussian_model(interval: tuple[float, float] = (0.0, 1.0)) -> Model:
    """x ~ N(0.5, C) for x in [0, 1], exactly, as a model whose own data lie in an interval."""
    low, high = interval
    values, vectors = torch.linalg.eigh((high - low) ** 2 * covariance().double())
    centre = (low + high) / 2

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        gains = level.alpha * values / (level.alpha**2 * values + level.sigma**2)
        shift = x_t.flatten(1) - level.alpha * centre
        basis = vectors.to(x_t)
        return (centre + shift @ basis @ (gains.to(x_t)[:, None] * basis.mT)).reshape(x_t.shape)

    return Model(denoiser, nn.Identity(), geometric(20, 50.0, 0.01), SHAPE, interval, "gaussian")


def posterior(x: Tensor, a: Tensor, tau: float, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (B, d) and covariance of N(x, C) given y = a x + tau e."""
    c = covariance()
    gain = c @ a.mT @ torch.linalg.inv(a @ c @ a.mT + tau**2 * torch.eye(len(a)))
    return x + (y - x @ a.mT) @ gain.mT, c - gain @ a @ c


INTERVALS = [(0.0, 1.0), (-1.0, 1.0)]


@pytest.mark.parametrize("interval", INTERVALS)
def test_our_model_is_its_denoiser(interval: tuple[float, float]) -> None:
    """0.5 + C (C + sigma^2)^-1 (x - 0.5) in [0, 1] units, at one sigma, one a row, and none."""
    guest = to_deepinv(gaussian_model(interval))
    assert isinstance(guest, deepinv.models.Denoiser)
    x = torch.rand(3, *SHAPE, generator=seeded(0))

    def expected(rows: Tensor, sigma: float) -> Tensor:
        gain = covariance() @ torch.linalg.inv(covariance() + sigma**2 * torch.eye(D))
        return (0.5 + (rows.flatten(1) - 0.5) @ gain.mT).reshape(rows.shape)

    torch.testing.assert_close(guest(x, 0.2), expected(x, 0.2))
    torch.testing.assert_close(guest(x, torch.tensor([0.2]).reshape(1, 1, 1, 1)), expected(x, 0.2))
    each = torch.cat([expected(x[:1], 0.1), expected(x[1:2], 0.3), x[2:]])
    torch.testing.assert_close(guest(x, torch.tensor([0.1, 0.3, 0.0])), each)
    assert torch.equal(guest(x, 0.0), x)


def physics_of(tau: float) -> Any:
    return deepinv.physics.Inpainting(
        img_size=SHAPE,
        mask=(torch.arange(D).reshape(SHAPE) % 3 > 0).float(),
        noise_model=deepinv.physics.GaussianNoise(tau),
    )


@pytest.mark.parametrize("interval", INTERVALS)
def test_its_physics_goes_into_restore_and_our_restoration_is_its_reconstructor(
    interval: tuple[float, float],
) -> None:
    """The mean of many draws is the posterior mean, and their spread the posterior's."""
    tau, physics, model = 0.05, physics_of(0.05), gaussian_model(interval)
    x = torch.rand(2, *SHAPE, generator=seeded(1))
    y = physics.A(x) + tau * torch.randn(2, *SHAPE, generator=seeded(2)) * physics.mask
    a = torch.diag(physics.mask.flatten())[physics.mask.flatten() > 0]
    mean, cov = posterior(
        torch.full((2, D), 0.5), a, tau, y.flatten(1)[:, physics.mask.flatten() > 0]
    )
    restorer = Restorer(model, covariance=FullMoments(model), steps=12, draws=200, seed=3)
    found = restorer(y, physics)
    assert isinstance(restorer, deepinv.models.Reconstructor)
    spread = cov.diagonal().sqrt()
    assert ((found.flatten(1) - mean).abs() < 5 * spread / 200**0.5 + 0.003).all()
    restored = restorer.restored(y, physics)
    torch.testing.assert_close(restored.std.flatten(1), spread.expand(2, D), rtol=0.2, atol=0.0)
    direct = mmdgs.restore(
        model,
        y,
        physics,
        noise=tau,
        covariance=FullMoments(model),
        steps=12,
        draws=200,
        seed=3,
        progress=None,
    )
    assert torch.equal(restored.draws, direct.draws)


@pytest.mark.parametrize("operator", [Box(SHAPE, 2), Downsample(SHAPE, 2)], ids=repr)
@pytest.mark.parametrize("interval", INTERVALS)
def test_our_covariance_is_its_fidelity(operator: Any, interval: tuple[float, float]) -> None:
    """With the Jacobian as covariance of a Gaussian it is deepinv's own moment matching, solved to
    the end.
    """
    model = gaussian_model(interval)
    physics = to_physics(operator, 0.05)
    x, y = (
        torch.rand(2, *SHAPE, generator=seeded(4)),
        torch.rand(2, *operator.out_shape, generator=seeded(5)),
    )
    y = operator.known(y)
    theirs = deepinv.sampling.MomentMatchingDataFidelity(
        denoiser=to_deepinv(model), cg_max_iter=40, cg_tol=1e-8
    )
    ours = CovarianceFidelity(model, FullMoments(model))
    for sigma in (0.1, 1.0):
        expected, denoised = theirs.grad(x.clone(), y, physics, sigma, get_model_outputs=True)
        found, mean = ours.grad(x.clone(), y, physics, torch.tensor(sigma), get_model_outputs=True)
        torch.testing.assert_close(
            found, expected, rtol=2e-3, atol=1e-3 * expected.abs().max().item()
        )
        torch.testing.assert_close(mean, denoised)
        assert torch.equal(ours.grad(x, y, physics, sigma), found)


def test_its_diffusion_samples_with_our_covariance() -> None:
    """The mean of draws by PosteriorDiffusion is near the posterior mean, with one evaluation a
    step.
    """
    tau, physics, model = 0.05, physics_of(0.05), gaussian_model()
    calls = []

    def counted(x_t: Tensor, level: NoiseLevel) -> Tensor:
        calls.append(level)
        return model(x_t, level)

    moments = FullMoments(counted)
    steps = torch.linspace(1, 0.0, 40, dtype=torch.float64)
    sampler = deepinv.sampling.PosteriorDiffusion(
        data_fidelity=CovarianceFidelity(model, moments),
        denoiser=to_deepinv(model),
        sde=deepinv.sampling.VarianceExplodingDiffusion(sigma_max=20.0, alpha=1.0),
        solver=deepinv.sampling.DDPMSolver(timesteps=steps, rng=torch.Generator()),
    )
    y = (physics.mask * 0.65).expand(64, *SHAPE)
    draws = sampler(y, physics, seed=0).float()
    a = torch.diag(physics.mask.flatten())[physics.mask.flatten() > 0]
    mean, cov = posterior(
        torch.full((1, D), 0.5), a, tau, y[:1].flatten(1)[:, physics.mask.flatten() > 0]
    )
    assert len(calls) == 39
    assert (
        draws.flatten(1).mean(0) - mean[0]
    ).abs().max() < 5 * cov.diagonal().max().sqrt() / 8 + 0.01


def test_an_operator_there_and_back() -> None:
    operator = Downsample(SHAPE, 2)
    back = as_operator(to_physics(operator, 0.1), SHAPE)
    x, y = (
        torch.rand(2, *SHAPE, generator=seeded(6)),
        torch.rand(2, *operator.out_shape, generator=seeded(7)),
    )
    torch.testing.assert_close(back(x), operator(x))
    torch.testing.assert_close(back.adjoint(y), operator.adjoint(y))


def test_bad_input() -> None:
    model, physics = gaussian_model(), deepinv.physics.Inpainting(img_size=SHAPE, mask=0.5)
    with pytest.raises(UsageError, match="Inpainting"):
        Restorer(model)(torch.zeros(1, *SHAPE), physics)
    fidelity = CovarianceFidelity(model, FullMoments(model))
    with pytest.raises(UsageError, match="got 2 different sigmas"):
        fidelity.grad(
            torch.zeros(2, *SHAPE),
            torch.zeros(2, *SHAPE),
            physics_of(0.1),
            torch.tensor([0.1, 0.2]),
        )
    with pytest.raises(UsageError, match="one for each of 2 rows, got 3"):
        to_deepinv(model)(torch.zeros(2, *SHAPE), torch.tensor([0.1, 0.2, 0.3]))


def test_where_deepinv_is_missing_one_line_says_so() -> None:
    code = "import sys; sys.modules['deepinv'] = None\nimport mmdgs\nmmdgs.interop.Restorer"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install mmdgs[deepinv]" in found.stderr.splitlines()[-1]


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmdgs, "load", lambda name: stand_in_model(tmp_path), raising=False)
    scope: dict[str, Any] = {}
    with torch.random.fork_rng([]):
        exec(blocks_of(INTEROP)[1], scope)
    assert scope["mean"].shape == scope["sample"].shape == (2, 3, 16, 16)
    torch.testing.assert_close(scope["draws"].mean(0), scope["mean"])


def test_the_benchmark_times_both_on_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import bench

    model = gaussian_model()
    monkeypatch.setattr(bench, "load", lambda name: model)
    monkeypatch.setattr(bench, "restore", partial(mmdgs.restore, covariance=FullMoments(model)))
    words = ["restore", "--operator", "sr:2", "--images", "3", "--device", "cpu", "--json", "-q"]
    result = CliRunner().invoke(bench.app, words)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert f"50 steps, {49 * 11 + 1} evaluations" in row["name"]
    assert min(row["plain"], row["ours"]) > 0
    # The prior's mean has 16.6 dB, a draw of the prior 13.6.
    psnr = re.search(r"PSNR ([\d.]+) and ([\d.]+) dB", row["name"])
    assert min(map(float, psnr.groups())) > 15


@pytest.mark.parametrize("operator", [Box(SHAPE, 2), Downsample(SHAPE, 2)], ids=repr)
@pytest.mark.parametrize("interval", INTERVALS)
def test_its_moment_matching_restores_our_models(
    operator: Any, interval: tuple[float, float]
) -> None:
    """Its mean is far nearer to the posterior mean than the prior's is, in [0, 1] units;
    evaluations are counted.
    """
    a = operator(torch.eye(D).reshape(-1, *SHAPE)).flatten(1).mT
    a = a[a.abs().sum(1) > 0]
    x = 0.5 + torch.linalg.cholesky(covariance()) @ torch.randn(D, generator=seeded(8))
    y = operator(x.reshape(1, *SHAPE))
    draws, evaluations = rivals.restore(
        rivals.MATCHING, gaussian_model(interval), y, operator, 0.02, 40, 60, 1, setting=3
    )
    # The residual, 3 iterations and the gradient take 5 products; the last step takes a mean.
    assert evaluations == 39 * (1 + 2 * 5) + 1
    mean, _ = posterior(torch.full((1, D), 0.5), a, 0.02, (a @ x)[None])
    error, prior = (draws.mean((0, 1)).flatten() - mean[0]).norm(), (0.5 - mean[0]).norm()
    assert error < 0.5 * prior
