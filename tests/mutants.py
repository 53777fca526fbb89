"""`make mutants`: does the suite notice a broken formula? Each mutant changes one place; its test file must then fail.

A mutant is a file of the package, the text in it that is changed (it must occur exactly once), what it is changed to,
and the test file that must notice. The package is copied for each of them, so the source tree is never touched.

    python tests/mutants.py [WORD ...]      only mutants with one of the words in their file or test's name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "src" / "mmdgs"
WORKERS = 2
LIMIT = 600
"""Seconds a test file may take: a mutant that hangs is one that was noticed."""


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    # Core: noise, posterior, covariances
    Mutant("noise.py", "noisier.alpha / cleaner.alpha", "cleaner.alpha / noisier.alpha", "test_noise.py"),
    Mutant(
        "noise.py",
        "noisier.sigma**2 - (a * cleaner.sigma) ** 2",
        "noisier.sigma**2 + (a * cleaner.sigma) ** 2",
        "test_noise.py",
    ),
    Mutant("noise.py", "return self.sigma**2 / self.alpha", "return self.sigma**2 * self.alpha", "test_moments.py"),
    Mutant(
        "posterior.py",
        "gain = cleaner.alpha * b**2 / level.sigma**2",
        "gain = b**2 / level.sigma**2",
        "test_posterior.py",
    ),
    Mutant(
        "posterior.py",
        "(a * cleaner.sigma**2 / level.sigma**2) * x_t",
        "(cleaner.sigma**2 / level.sigma**2) * x_t",
        "test_posterior.py",
    ),
    Mutant("posterior.py", "self.cov.affine(gain**2,", "self.cov.affine(gain,", "test_posterior.py"),
    Mutant("posterior.py", "+ self.cov.logdet() +", "- self.cov.logdet() +", "test_posterior.py"),
    Mutant("linalg/operators.py", "return self.variances.sqrt() * z", "return self.variances * z", "test_linalg.py"),
    Mutant(
        "linalg/operators.py",
        "(self.vectors * self.values[:, None, :]) @ self.vectors.mT",
        "(self.vectors * self.values[:, :, None]) @ self.vectors.mT",
        "test_linalg.py",
    ),
    Mutant(
        "linalg/operators.py",
        "torch.stack([-sin, cos, cos, sin], 1)",
        "torch.stack([sin, cos, cos, sin], 1)",
        "test_linalg.py",
    ),
    Mutant("linalg/operators.py", "(values < floor).flatten(1)", "(values > floor).flatten(1)", "test_moments.py"),
    Mutant("linalg/spectral.py", "rows[0] *= math.sqrt(0.5)", "rows[0] *= 1.0", "test_spectral.py"),
    Mutant("linalg/spectral.py", "inverse=True, squared=True", "inverse=False, squared=True", "test_linalg.py"),
    Mutant(
        "linalg/krylov.py",
        "torch.cat([coupling, coupling[..., :-1].flip(-1)], -1)",
        "torch.cat([coupling, coupling[..., :-1]], -1)",
        "test_krylov.py",
    ),
    Mutant("linalg/krylov.py", "for _ in range(2):", "for _ in range(0):", "test_krylov.py"),
    Mutant(
        "linalg/krylov.py",
        "return self.norm.square() * _first_column",
        "return self.norm * _first_column",
        "test_krylov.py",
    ),
    # Denoisers, Jacobians, estimators, targets
    Mutant(
        "denoisers.py",
        "return (x_t - level.sigma * self.predict(x_t, level)) / level.alpha",
        "return (x_t - level.sigma * self.predict(x_t, level)) * level.alpha",
        "test_denoisers.py",
    ),
    Mutant(
        "denoisers.py",
        "(level.alpha * x_t - level.sigma * v)",
        "(level.sigma * x_t - level.alpha * v)",
        "test_denoisers.py",
    ),
    Mutant(
        "denoisers.py",
        "variance = level.sigma**2 + (level.alpha * self.data_std) ** 2",
        "variance = level.sigma**2 + self.data_std ** 2",
        "test_denoisers.py",
    ),
    Mutant(
        "jacobians.py",
        "pulled if self._pushforward is None else 0.5 * (pulled + self._pushforward(v, pulled))",
        "pulled",
        "test_krylov.py",
    ),
    Mutant("moments/full.py", "(jacobian + jacobian.mT)", "(jacobian + jacobian)", "test_moments.py"),
    Mutant(
        "moments/diagonal.py",
        "floored(level.tweedie * diagonal",
        "floored(level.variance * diagonal",
        "test_moments.py",
    ),
    Mutant("moments/learned.py", "(2 * log_std).exp()", "log_std.exp()", "test_moments.py"),
    Mutant("moments/probes.py", "self.hits += (v != 0).sum(0)", "self.hits += 1", "test_probes.py"),
    Mutant(
        "targets.py",
        "gain = level.alpha * self.values / noised.values",
        "gain = self.values / noised.values",
        "test_targets.py",
    ),
    Mutant(
        "targets.py",
        "values=level.sigma**2 * self.values / noised.values",
        "values=level.sigma * self.values / noised.values",
        "test_targets.py",
    ),
    Mutant(
        "derivatives.py",
        "y = precise - group_mean(line).detach()",
        "y = precise - group_mean(line).detach() * 0",
        "test_compiled.py",
    ),
    Mutant("compiled.py", "0.5 * (pullback(row) + pushforward(row))", "pullback(row)", "test_compiled.py"),
    # Samplers and schedules
    Mutant(
        "samplers/gibbs.py",
        "state.x * (following.alpha / level.alpha)",
        "state.x * (level.alpha / following.alpha)",
        "test_plans.py",
    ),
    Mutant("samplers/ancestral.py", "(most / size).clamp(max=1)", "(most / size)", "test_plans.py"),
    Mutant(
        "samplers/ancestral.py",
        "transition(following, level)[1] if self.large",
        "transition(following, level)[0] if self.large",
        "test_plans.py",
    ),
    Mutant(
        "samplers/deterministic.py",
        "noise = (state.x - level.alpha * mean) / level.sigma",
        "noise = (state.x - mean) / level.sigma",
        "test_plans.py",
    ),
    Mutant("samplers/deterministic.py", "0.5 * (slope + corrected)", "slope", "test_plans.py"),
    Mutant("samplers/langevin.py", "math.sqrt(2 * a) * randn_like", "math.sqrt(a) * randn_like", "test_plans.py"),
    Mutant("samplers/langevin.py", "(1 - eta) ** 2 * now**2", "(1 - eta) * now**2", "test_plans.py"),
    Mutant(
        "schedules.py",
        "fractions = [i / (count - 1) for i in range(count)]",
        "fractions = [i / count for i in range(count)]",
        "test_schedules.py",
    ),
    Mutant("schedules.py", "for t in range(1, count + 1)]", "for t in range(1, count)]", "test_schedules.py"),
    Mutant(
        "schedules.py",
        '"leading": lambda k, count, total: k * (total // count)',
        '"leading": lambda k, count, total: k * total // count',
        "test_schedules.py",
    ),
    # Randomness
    Mutant("randomness.py", "ROUNDS = 10", "ROUNDS = 9", "test_randomness.py"),
    Mutant("randomness.py", "code | number", "number", "test_randomness.py"),
    # Losses and metrics
    Mutant(
        "losses.py",
        "0.5 * level.alpha**2 / level.sigma**4",
        "0.5 * level.alpha**2 / level.sigma**2",
        "test_losses_training.py",
    ),
    Mutant(
        "losses.py",
        "return 2 * level.sigma**2 * (1 + (level.sigma / level.alpha / DATA_STD) ** 2)",
        "return 2 * level.sigma**2 * (1 + (level.sigma / DATA_STD) ** 2)",
        "test_many_levels.py",
    ),
    Mutant("metrics/mmd.py", "return 2 * variance * n / (n - 1)", "return 2 * variance", "test_metrics.py"),
    Mutant("metrics/mmd.py", "2 if same and j > i else 1", "1", "test_metrics.py"),
    Mutant(
        "metrics/frechet.py",
        "return self.scatter / (self.count - 1)",
        "return self.scatter / self.count",
        "test_image_metrics.py",
    ),
    Mutant("metrics/frechet.py", "(self.count * other.count / count)", "(self.count / count)", "test_image_metrics.py"),
    # Training
    # Generation and models
]


def noticed(mutant: Mutant) -> tuple[str, float]:
    """Whether the test file fails with the mutant: "noticed", "MISSED", or what is wrong with the mutant itself."""
    started = time.perf_counter()
    source = (PACKAGE / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        return f"STALE: the text occurs {source.count(mutant.old)} times in {mutant.file}", 0.0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src" / "mmdgs"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "weights").symlink_to(PACKAGE.parents[1] / "weights")
        (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(TESTS / mutant.test)]
        paths = os.pathsep.join([str(copy.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT, cwd=TESTS.parent)
            failed = done.returncode == 1
        except subprocess.TimeoutExpired:
            failed = True
    return "noticed" if failed else "MISSED", time.perf_counter() - started


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.file or word in m.test for word in words)]
    with ThreadPoolExecutor(WORKERS) as pool:
        results = pool.map(noticed, chosen)
        found = []
        for mutant, (outcome, seconds) in zip(chosen, results, strict=True):
            found.append(outcome)
            print(
                f"{outcome:8} {seconds:5.0f} s  {mutant.file}: {mutant.old!r} -> {mutant.new!r} ({mutant.test})",
                flush=True,
            )
    caught = found.count("noticed")
    print(f"{caught} of {len(found)} mutants noticed")
    return int(caught < len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
