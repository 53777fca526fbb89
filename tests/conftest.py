"""Fixtures shared by the tests."""
# ruff: noqa: E402  the home folder is set before anything is imported that looks for it

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import tempfile

# Tests read nothing from the user's home folder and write nothing there: each process has an empty
# one of its own. That of a worker of xdist is inside that of the process that started it, which
# removes them all.
_worker = os.environ.get("PYTEST_XDIST_WORKER")
_home = tempfile.mkdtemp(prefix="mmdgs-home-", dir=os.environ["HOME"] if _worker else None)
if not _worker:
    atexit.register(shutil.rmtree, _home, ignore_errors=True)
for _name in (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR", "HF_HOME", "TORCH_HOME",
    "MMDGS_CACHE", "MMDGS_DATA",
):  # fmt: skip
    os.environ.pop(_name, None)
if _inception := os.environ.pop("MMDGS_INCEPTION", None):  # of the tests of the real network alone
    os.environ["INCEPTION_OF_TESTS"] = _inception
os.environ["HOME"] = _home

import oracles
import pytest
import sizes
import torch
import typer.testing

import mmdgs
from mmdgs.demo import figures, page, photograph, toys
from mmdgs.moments import calibrated, ocm
from mmdgs.targets import GaussianMixture
from mmdgs.training import run as training_run, untrained as new_heads

# The tests' matrices are small: one thread is faster than two that wait for each other, above all
# on a busy machine.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start, too
# A suite that a shell started in the background ignores Ctrl-C, and so would what its tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# All commands with their options take 20 ms to build, and hundreds of tests run one.
typer.testing._get_command = functools.cache(typer.testing._get_command)

with contextlib.suppress(ImportError):  # `make test-gpu` takes the packages that are there
    from hypothesis import settings

    # The same few examples each time; `make test-all` asks for "more", which are others each time.
    settings.register_profile("few", max_examples=5, derandomize=True, deadline=None, database=None)
    more = {"deadline": None, "database": None, "print_blob": True}
    settings.register_profile("more", max_examples=200, **more)
    settings.load_profile("few")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def paper() -> GaussianMixture:
    return oracles.paper_mixture()


@pytest.fixture
def skewed() -> GaussianMixture:
    return oracles.skewed_mixture()


@pytest.fixture
def gaussian() -> GaussianMixture:
    return oracles.gaussian_target()


@pytest.fixture(params=oracles.LEVELS.values(), ids=oracles.LEVELS.keys())
def level(request: pytest.FixtureRequest) -> mmdgs.NoiseLevel:
    return request.param


@pytest.fixture(params=oracles.TARGETS.values(), ids=oracles.TARGETS.keys())
def target(request: pytest.FixtureRequest) -> tuple[GaussianMixture, tuple[int, ...]]:
    """A mixture, and the event shape of its points."""
    make, event = request.param
    return make(), event


@pytest.fixture(autouse=True)
def _no_global_randomness() -> None:
    """Every draw takes a generator: a test that moves the global one found code that does not."""
    before = torch.get_rng_state()
    yield
    same = torch.equal(before, torch.get_rng_state())
    assert same, "something drew from torch's global generator"


@pytest.fixture
def tiny(monkeypatch):
    """Make `--quick` tiny: experiments end to end in seconds."""
    monkeypatch.setattr(toys, "QUICK", sizes.TINY)
    monkeypatch.setattr(figures, "GRID", 41)
    figures.true_log_density.cache_clear()
    monkeypatch.setattr(page, "DIGITS", {"chains": 2, "steps": 1, "probes": 1})
    for name, value in {"SIDE": 64, "RESTORED_SIDE": 48, "DRAWS": 4}.items():
        monkeypatch.setattr(photograph, name, value)


@pytest.fixture
def untrained(monkeypatch):
    """Calibrations take means farther from the data than the noise, as those of drawn weights."""
    monkeypatch.setattr(calibrated, "require_nearer", lambda level, errors: None)


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are made, but painted as an empty PNG: matplotlib takes seconds for a large one."""
    sizes.unpaint(monkeypatch)


@pytest.fixture
def small_fits(monkeypatch):
    """What a training measures beside its loss takes few examples: seconds of products less."""
    monkeypatch.setattr(training_run, "ISOTROPIC_EXAMPLES", {"cpu": 16})
    monkeypatch.setattr(training_run, "HEAD_EXAMPLES", {"cpu": 8})
    monkeypatch.setattr(new_heads, "SCALE_EXAMPLES", {"cpu": 8})
    monkeypatch.setattr(ocm, "FITTED_LEVELS", 4)
