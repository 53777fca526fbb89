"""Properties of operators, estimators and samplers over shapes, dtypes and noise levels from 1e-4 to 1e4.

`make test` tries a few examples, the same each time; `make test-all` hundreds (the profile "more", conftest.py).
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import random_covariances
from torch import Tensor
from torch.distributions import MultivariateNormal
from toy_models import exact

import mmdgs
from mmdgs.generation import Method, generate, make_plan
from mmdgs.linalg import Covariance
from mmdgs.moments import ExactMoments, FullMoments, IsotropicMoments, KrylovMoments, Moments, SpectralMoments
from mmdgs.moments.contract import FLOOR
from mmdgs.operators import Blur, Box, Crop, Downsample, Fourier, Grayscale, Mask, Matrix, Operator, compose, linear
from mmdgs.randomness import Streams
from mmdgs.samplers import (
    Plan,
    ancestral_plan,
    consistent_plan,
    ddim_plan,
    gibbs_plan,
    heun_plan,
    langevin_plan,
    run,
    single_level_plan,
)
from mmdgs.targets import GaussianMixture

hypothesis = pytest.importorskip("hypothesis")
st, given, assume = hypothesis.strategies, hypothesis.given, hypothesis.assume

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}
"""Each with the relative error that some hundred operations may have."""
seeds = st.integers(0, 2**31)
sides = st.sampled_from([1, 2, 3, 4, 5, 6])
images = st.tuples(st.integers(1, 3), sides, sides)
decades = st.floats(-4, 4)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(found: Tensor, expected: Tensor, error: float) -> None:
    """The same but for an error relative to the largest number."""
    assert found.shape == expected.shape
    size = max(found.abs().max().item(), expected.abs().max().item())
    assert (found - expected).abs().max().item() <= error * size, f"{found} is not {expected}"


# --- operators ---------------------------------------------------------------------------------------------------


@st.composite
def operators(draw: Callable, shape: tuple[int, int, int]) -> list[Operator]:
    """One of each kind."""
    channels, height, width = shape
    random = torch.Generator().manual_seed(draw(seeds))
    factors = [one for one in range(1, 7) if height % one == 0 and width % one == 0]
    keep = torch.rand(height, width, generator=random) < draw(st.floats(0.3, 1))
    keep[0, 0] = True  # something is measured
    made: list[Operator] = [
        Mask.random(shape, draw(st.floats(0, 0.99)), generator=random),
        Crop(shape, (draw(st.integers(1, height)), draw(st.integers(1, width)))),
        Downsample(shape, factors[-1]),
        Grayscale(shape, draw(st.lists(st.floats(0.1, 10), min_size=channels, max_size=channels))),
        Blur.gaussian(shape, draw(st.floats(0.01, max(height, width) / 2))),
        Blur.motion(shape, draw(st.integers(1, max(height, width))), draw(st.floats(-360, 360))),
        Blur(shape, torch.randn(draw(st.integers(1, 9)), draw(st.integers(1, 9)), generator=random)),
        Fourier(shape, keep),
        Matrix(torch.randn(draw(st.integers(1, 9)), math.prod(shape), generator=random), shape),
        linear(lambda x: 3 * x.flip(-1).cumsum(-2), shape),
    ]
    if width > 1:
        made.append(Box(shape, (height, width - 1)))
    return made


@st.composite
def composed(draw: Callable, first: Operator) -> list[Operator]:
    """Up to three operators, one after another."""
    parts = [first]
    while len(parts) < 3 and len(parts[-1].out_shape) == 3 and draw(st.booleans()):
        parts.append(draw(st.sampled_from(draw(operators(tuple(parts[-1].out_shape))))))
    return parts


@given(images, st.data(), st.sampled_from(list(DTYPES)), seeds, decades, st.integers(1, 3))
def test_operators_are_linear_row_by_row_and_have_their_adjoint(
    shape: tuple[int, int, int], data: st.DataObject, dtype: torch.dtype, seed: int, decade: float, rows: int
) -> None:
    made = data.draw(operators(shape))
    parts = data.draw(composed(data.draw(st.sampled_from(made))))
    whole = compose(*parts)
    u, v = 10**decade * numbers(2, rows, *shape, seed=seed, dtype=dtype)
    step = u
    for part in parts:
        step = part(step)
    assert torch.equal(step, whole(u))
    for operator in (*made, whole):
        assert_linear(operator, u, v, numbers(rows, *operator.out_shape, seed=seed + 1, dtype=dtype), DTYPES[dtype])


def assert_linear(operator: Operator, u: Tensor, v: Tensor, y: Tensor, error: float) -> None:
    """Linear, row by row, <A u, y> = <u, A' y>, and `squares` is what it says."""
    measured, other, back = operator(u), operator(v), operator.adjoint(y)
    assert measured.dtype == back.dtype == u.dtype
    size = measured.norm() * y.norm() + u.norm() * back.norm()
    assert ((measured * y).sum() - (u * back).sum()).abs() <= error * size, operator
    largest = measured.abs().max() + other.abs().max()
    assert (operator(2 * u - 3 * v) - (2 * measured - 3 * other)).abs().max() <= 5 * error * largest, operator
    assert_near(torch.cat([operator(row[None]) for row in u]), measured, error)
    squares = operator.squares(u.square())
    if squares is not None:
        dense = operator(torch.eye(u[0].numel(), dtype=u.dtype).reshape(-1, *operator.shape)).flatten(1).mT
        whole = torch.einsum("id,bd,jd->bij", dense, u.square().flatten(1), dense)
        assert_near(torch.diag_embed(squares.flatten(1)), whole, error)


# --- estimators --------------------------------------------------------------------------------------------------


@st.composite
def targets(draw: Callable) -> tuple[GaussianMixture, tuple[int, ...]]:
    event = draw(st.sampled_from([(1,), (2,), (5,), (1, 2, 3), (2, 3, 1)]))
    d, components, seed = math.prod(event), draw(st.integers(1, 3)), draw(seeds)
    means = numbers(components, d, seed=seed)
    return GaussianMixture([1 / components] * components, means, random_covariances(components, d, seed)), event


@st.composite
def levels(draw: Callable) -> mmdgs.NoiseLevel:
    return mmdgs.NoiseLevel(alpha=draw(st.floats(0.05, 1)), sigma=10 ** draw(decades))


def estimators(mixture: GaussianMixture, x: Tensor, level: mmdgs.NoiseLevel, seed: int) -> dict[str, Moments]:
    denoiser, random = mixture.denoiser(), torch.Generator().manual_seed(seed)
    return {
        "full": FullMoments(denoiser),
        "diagonal": mmdgs.DiagonalMoments(denoiser, probes=None),
        "probes": mmdgs.DiagonalMoments(denoiser, probes=2),
        "krylov": KrylovMoments(denoiser, steps=x[0].numel()),
        "isotropic": IsotropicMoments.fit(denoiser, x, level, generator=random),
        "spectral": SpectralMoments.fit(denoiser, x, [level], generator=random),
        "exact": ExactMoments(mixture),
    }


def root_of(cov: Covariance, like: Tensor) -> Tensor:
    """R (B, d, n), column by column."""
    shape = cov.normals(like.shape[1:])
    basis = torch.eye(math.prod(shape), dtype=like.dtype)
    return torch.stack([cov.root(one.expand(len(like), -1).reshape(-1, *shape)).flatten(1) for one in basis], -1)


def assert_a_covariance(cov: Covariance, like: Tensor, error: float) -> Tensor:
    """Symmetric, positive, and the same through all of its actions on vectors like (B, ...); returns it (B, d, d)."""
    dense, size = cov.dense(), cov.dense().abs().amax((1, 2))
    assert_near(dense, dense.mT, error)
    assert (torch.linalg.eigvalsh(dense / size[:, None, None]) > -error).all()
    assert (cov.diagonal() > 0).all()
    assert_near(cov.diagonal().flatten(1), dense.diagonal(dim1=1, dim2=2), error)
    root = root_of(cov, like)
    assert_near(root @ root.mT, dense, error)
    product = torch.einsum("bij,bj->bi", dense, like.flatten(1))
    assert_near(cov.apply(like).flatten(1), product, error)
    assert_near(cov.variance_along(like[None])[0], (like.flatten(1) * product).sum(1), error)
    return dense


@given(targets(), levels(), seeds)
def test_every_estimator_gives_a_covariance_and_its_density(
    target: tuple[GaussianMixture, tuple[int, ...]], level: mmdgs.NoiseLevel, seed: int
) -> None:
    mixture, event = target
    x = mixture.sample((4,), generator=torch.Generator().manual_seed(seed)).reshape(4, *event)
    x_t = mmdgs.add_noise(x, level, generator=torch.Generator().manual_seed(seed + 1))
    truth = mixture.posterior(x_t, level).covariance
    # Variances below a millionth of the noise's are lifted to it: at 1,000 times the data's spread that is all of them.
    values, vectors = torch.linalg.eigh(truth)
    lifted = (vectors * values.clamp(min=FLOOR * level.variance)[:, None, :]) @ vectors.mT
    for name, post in estimators(mixture, x, level, seed).items():
        q = post(x_t, level, generator=torch.Generator().manual_seed(seed + 2))
        dense = assert_a_covariance(q.cov, x_t, 1e-9)
        if name in ("full", "krylov", "exact"):
            assert_near(dense, lifted, 1e-6)
        elif name == "diagonal":
            expected = truth.diagonal(dim1=1, dim2=2).clamp(min=FLOOR * level.variance)
            assert_near(q.cov.diagonal().flatten(1), expected, 1e-6)
        values = torch.linalg.eigvalsh(dense)
        condition = (values[:, -1] / values[:, 0]).max().item()
        if not 0 < condition < 1e8:  # a dense density has no digits left
            continue
        whole = MultivariateNormal(q.mean.flatten(1), dense)
        draw = q.sample(generator=torch.Generator().manual_seed(seed + 3))
        assert_near(q.log_prob(draw), whole.log_prob(draw.flatten(1)), 1e-14 * condition + 1e-9)


@given(st.data(), levels(), seeds, st.floats(-3, 4))
def test_given_measurements_is_the_closed_form(
    data: st.DataObject, level: mmdgs.NoiseLevel, seed: int, decade: float
) -> None:
    """Noise from a thousandth of the measurements' spread on: S = A C A' + noise^2 is as well conditioned as that."""
    event = data.draw(st.sampled_from([(1, 2, 3), (2, 3, 1), (3, 2, 2)]))
    d = math.prod(event)
    mixture = GaussianMixture([0.5, 0.5], numbers(2, d, seed=seed), random_covariances(2, d, seed))
    x = mixture.sample((4,), generator=torch.Generator().manual_seed(seed)).reshape(4, *event)
    x_t = mmdgs.add_noise(x, level, generator=torch.Generator().manual_seed(seed + 1))
    made = data.draw(operators(event))
    for post in estimators(mixture, x, level, seed).values():
        q = post(x_t, level, generator=torch.Generator().manual_seed(seed + 2))
        assert_conditioned(q, x_t, x, data.draw(st.sampled_from(made)), 10**decade, seed + 3)


def assert_conditioned(
    q: mmdgs.Gaussian, x_t: Tensor, x: Tensor, operator: Operator, relative: float, seed: int
) -> None:
    """`given` against dense matrices, with noise relative to the spread of the measurements."""
    prior, d = q.cov.dense(), x[0].numel()
    a = operator(torch.eye(d, dtype=torch.float64).reshape(d, *operator.shape)).flatten(1).mT
    spread = a @ prior @ a.mT
    noise = relative * math.sqrt(spread.diagonal(dim1=1, dim2=2).max().item())
    y = operator(x) + noise * numbers(len(x), *operator.out_shape, seed=seed)
    found = q.given(y, operator, noise)
    gain = prior @ a.mT @ torch.linalg.inv(spread + noise**2 * torch.eye(len(a), dtype=torch.float64))
    left = operator.known(y).flatten(1) - q.mean.flatten(1) @ a.mT
    assert_near(found.mean.flatten(1), q.mean.flatten(1) + torch.einsum("bij,bj->bi", gain, left), 1e-6)
    assert_near(assert_a_covariance(found.cov, x_t, 1e-6), prior - gain @ a @ prior, 1e-6)


# --- samplers ----------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: Callable, rows: int) -> list[range]:
    """The rows in batches of any sizes, in any order."""
    inner = sorted(draw(st.sets(st.integers(1, rows - 1))))
    return draw(st.permutations([range(a, b) for a, b in zip([0, *inner], [*inner, rows], strict=True)]))


def plans(mixture: GaussianMixture, path: list[mmdgs.NoiseLevel]) -> dict[str, Plan]:
    denoiser = mixture.denoiser()
    full = FullMoments(denoiser)
    return {
        "single level": single_level_plan(full, path[-1], steps=2),
        "probes": single_level_plan(mmdgs.DiagonalMoments(denoiser, probes=2), path[-1], steps=2),
        "krylov": single_level_plan(KrylovMoments(denoiser, steps=2), path[-1], steps=2),
        "gibbs": gibbs_plan(full, path, sweeps=1),
        "langevin": langevin_plan(denoiser, path, steps=2),
        "consistent": consistent_plan(denoiser, path),
        "ancestral": ancestral_plan(full, path),
        "ddim": ddim_plan(denoiser, path, eta=0.5),
        "heun": heun_plan(denoiser, path, churn=0.1),
    }


@given(targets(), st.data(), seeds, decades, st.floats(0.5, 4))
def test_a_chain_does_not_depend_on_the_batch_it_is_in(
    target: tuple[GaussianMixture, tuple[int, ...]], data: st.DataObject, seed: int, decade: float, reach: float
) -> None:
    mixture, event = target
    path = [mmdgs.NoiseLevel(sigma=10 ** min(4.0, decade + reach * step / 3)) for step in (3, 2, 1, 0)]
    assume(path[0].sigma > path[1].sigma)
    rows = 5
    parts = data.draw(cuts(rows))
    for plan in plans(mixture, path).values():
        start = plan.noise(event, rows, generator=Streams(seed, rows, purpose="start")).double()
        whole = run(plan, start, seed=seed, progress=None).x
        found = torch.empty_like(whole)
        for part in parts:
            rest = slice(part.start, part.stop)
            found[rest] = run(plan, start[rest], seed=seed, first_chain=part.start, progress=None).x
        assert torch.isfinite(whole).all()
        assert_near(found, whole, 1e-9)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["ddim", "gibbs", "ancestral"]), seeds)
def test_samples_do_not_depend_on_batches_and_processes(
    count: int, batch: int, processes: int, sampler: str, seed: int
) -> None:
    model = exact()
    plan = make_plan(Method(sampler, **({} if sampler == "gibbs" else {"steps": 2})), model)
    whole = generate(model, plan, count, seed=seed, progress=None).x
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "x.npz")
        together = threading.Barrier(processes, timeout=60)

        def share(rank: int) -> None:
            """One process of several, as far as a run knows: here a thread, and a barrier they wait at."""
            several = SimpleNamespace(
                num_processes=processes,
                process_index=rank,
                is_main_process=rank == 0,
                wait_for_everyone=together.wait,
            )
            more = {"batch_size": batch, "floating": True, "accelerator": several}
            try:
                generate(model, plan, count, out=out, seed=seed, progress=None, **more)
            except BaseException:
                together.abort()
                raise

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(share, range(processes)))
        found = torch.from_numpy(np.load(out)["x"])
    assert_near(found, whole, 1e-5)  # in float32
