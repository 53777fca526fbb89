"""`make mutants`: does the suite notice a broken formula? Each mutant changes one place; its test must then fail.

A mutant is a file of the package, the text in it that is changed (it must occur exactly once), what it is changed to,
and the test that must notice: a file, and after it what chooses among its tests (`file::test`, or `file -k word`).
Every test must pass without a mutant first. The package is copied each time, so the source tree is never touched.

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
"""Seconds that tests may take: a mutant that hangs is one that was noticed."""


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
        "noise.py",
        "self._rows[below] ** (1 - share) * self._rows[min(below + 1, last)] ** share",
        "self._rows[below] * (1 - share) + self._rows[min(below + 1, last)] * share",
        "test_noise.py",
    ),
    Mutant("noise.py", "place.long()", "place.round().long()", "test_noise.py"),
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
        "matmul(self.vectors * self.values[:, None, :], self.vectors.mT)",
        "matmul(self.vectors * self.values[:, :, None], self.vectors.mT)",
        "test_linalg.py",
    ),
    Mutant(
        "linalg/operators.py",
        "torch.stack([-sin, cos, cos, sin], 1)",
        "torch.stack([sin, cos, cos, sin], 1)",
        "test_linalg.py",
    ),
    Mutant("linalg/repair.py", "(values < least).flatten(1)", "(values > least).flatten(1)", "test_moments.py"),
    Mutant("linalg/repair.py", "(values < floor).flatten(1)", "(values > floor).flatten(1)", "test_linalg.py"),
    Mutant("linalg/repair.py", "rows.clamp(max=0).square()", "rows.square()", "test_linalg.py"),
    Mutant(
        "linalg/krylov.py", "self._estimated.double() + lift", "self._estimated.double()", "test_krylov.py -k diagonal"
    ),
    Mutant(
        "moments/calibrated.py",
        "by_direction = distances / numbers",
        "by_direction = numbers / distances",
        "test_calibrate.py",
    ),
    Mutant("moments/calibrated.py", "(by_direction * by_spread).sqrt()", "by_direction", "test_calibrate.py -k alike"),
    Mutant("moments/calibrated.py", "q.cov.affine(scale, 0.0)", "q.cov", "test_calibrate.py"),
    Mutant(
        "generation/engine.py",
        "repaired += len(result.x) * result.repaired",
        "repaired += result.repaired",
        "test_generate.py -k repairs",
    ),
    Mutant(
        "generation/engine.py",
        'note["samples"] * note["repaired"]',
        'samples / len(notes) * note["repaired"]',
        "test_generate.py -k repairs",
    ),
    Mutant("linalg/spectral.py", "rows[0] *= math.sqrt(0.5)", "rows[0] *= 1.0", "test_spectral.py -k scipys"),
    Mutant("linalg/spectral.py", "inverse=True, squared=True", "inverse=False, squared=True", "test_linalg.py"),
    Mutant(
        "linalg/lanczos.py",
        "torch.cat([coupling, coupling[..., :-1].flip(-1)], -1)",
        "torch.cat([coupling, coupling[..., :-1]], -1)",
        "test_krylov.py -k mirror",
    ),
    Mutant("linalg/lanczos.py", "for _ in range(2):", "for _ in range(0):", "test_krylov.py -k with_all_steps"),
    Mutant(
        "linalg/lanczos.py",
        "return self.norm.square() * (weights",
        "return self.norm * (weights",
        "test_krylov.py -k with_all_steps",
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
        "test_many_levels.py -k preconditioning_alone",
    ),
    Mutant(
        "jacobians.py",
        "pulled if self._pushforward is None else 0.5 * (pulled + self._pushforward(v, pulled))",
        "pulled",
        "test_krylov.py -k with_all_steps",
    ),
    Mutant("moments/full.py", "(jacobian + jacobian.mT)", "(jacobian + jacobian)", "test_moments.py"),
    Mutant(
        "moments/diagonal.py",
        "variances = level.tweedie * diagonal",
        "variances = level.variance * diagonal",
        "test_moments.py",
    ),
    Mutant("moments/learned.py", "(2 * log_std).exp()", "log_std.exp()", "test_moments.py"),
    Mutant("moments/probes.py", "self.hits += (v != 0).sum(0)", "self.hits += 1", "test_probes.py"),
    Mutant("moments/probes.py", "keepdim=True) / (self.count - 1)", "keepdim=True)", "test_probes.py -k signs"),
    Mutant("moments/probes.py", "(gain + 1 / count) * noise", "gain * gain * noise", "test_probes.py"),
    Mutant("moments/calibrated.py", "if scaled else torch.ones_like(grid)", "", "test_ocm.py -k finished"),
    Mutant("moments/lowrank.py", "level.ratio >= self.below", "level.ratio <= self.below", "test_lowrank.py -k below"),
    Mutant(
        "linalg/repair.py",
        "torch.maximum(floor, (share * errors)",
        "torch.minimum(floor, (share * errors)",
        "test_linalg.py",
    ),
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
        "test_compiled.py -k group_norm",
    ),
    Mutant(
        "compiled.py", "0.5 * (pullback(row) + pushforward(row))", "pullback(row)", "test_compiled.py -k one_program"
    ),
    # Samplers and schedules
    Mutant(
        "samplers/gibbs.py",
        "state.x * (following.alpha / level.alpha)",
        "state.x * (level.alpha / following.alpha)",
        "test_plans.py -k rescaled",
    ),
    Mutant("samplers/mirrored.py", "(following.sigma / level.sigma)", "1.0", "test_given.py -k mirrored"),
    Mutant("guidance.py", "level), self.weight)", "level), 2.0)", "test_guidance.py"),
    Mutant("samplers/deterministic.py", "length - (1 - fall) / rate", "length", "test_plans.py"),
    Mutant("samplers/deterministic.py", "2 * linear / rate", "2 * linear", "test_plans.py -k sde"),
    Mutant("samplers/deterministic.py", "-2 * self.eta * length", "-self.eta * length", "test_plans.py -k sde"),
    Mutant("operators/images.py", "/ math.sqrt(factor)", "/ factor", "test_operators.py"),
    Mutant("samplers/ancestral.py", "(most / size).clamp(max=1)", "(most / size)", "test_plans.py -k bounded"),
    Mutant(
        "samplers/ancestral.py",
        "transition(following, level)[1] if self.large",
        "transition(following, level)[0] if self.large",
        "test_plans.py -k fixed_variances",
    ),
    Mutant(
        "samplers/deterministic.py",
        "noise = (state.x - level.alpha * mean) / level.sigma",
        "noise = (state.x - mean) / level.sigma",
        "test_plans.py -k deterministic",
    ),
    Mutant("samplers/deterministic.py", "0.5 * (slope + corrected)", "slope", "test_plans.py -k deterministic"),
    Mutant(
        "samplers/langevin.py",
        "math.sqrt(2 * a) * randn_like",
        "math.sqrt(a) * randn_like",
        "test_plans.py -k stationary",
    ),
    Mutant(
        "samplers/langevin.py", "(1 - eta) ** 2 * now**2", "(1 - eta) * now**2", "test_plans.py -k consistent_annealing"
    ),
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
    Mutant("randomness.py", "(s >> 32) & WORD]", "0]", "test_randomness.py"),
    Mutant("randomness.py", "blocks >> 32, row", "blocks & 0, row", "test_randomness.py"),
    Mutant("randomness.py", "first_row + row) for", "row) for", "test_randomness.py"),
    Mutant("randomness.py", "lane.position // 4 * 4", "lane.position", "test_randomness.py"),
    Mutant("randomness.py", 'f"{checked_seed(seed)} {purpose}"', 'f"{purpose}"', "test_randomness.py"),
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
        "test_many_levels.py -k weightings",
    ),
    Mutant("metrics/discrepancy.py", "return 2 * variance * n / (n - 1)", "return 2 * variance", "test_metrics.py"),
    Mutant("metrics/discrepancy.py", "2 if same and j > i else 1", "1", "test_metrics.py"),
    Mutant(
        "metrics/frechet.py",
        "return self.scatter / (self.count - 1)",
        "return self.scatter / self.count",
        "test_image_metrics.py",
    ),
    Mutant("metrics/frechet.py", "(self.count * other.count / count)", "(self.count / count)", "test_image_metrics.py"),
    # Training
    Mutant(
        "training/step.py",
        "min(self.decay, (1 + step) / (10 + step))",
        "self.decay",
        "test_training_engine.py::test_the_average_is_its_recursion",
    ),
    Mutant("training/step.py", "value.sum() / len(indices)", "value.mean()", "test_training_engine.py -k parts"),
    Mutant(
        "training/step.py",
        'load_optimisers(self.optimisers, groups["optimiser"])',
        "pass",
        "test_training_engine.py -k two_halves",
    ),
    Mutant(
        "training/step.py",
        'groups.get("average", {})',
        "{}",
        "test_training_engine.py -k two_halves",
    ),
    Mutant("training/step.py", "alpha=-rate * size", "alpha=rate * size", "test_optimiser.py"),
    Mutant(
        "training/step.py", "lerp(gradients, averages, momentum)", "lerp(gradients, averages, 1)", "test_optimiser.py"
    ),
    Mutant("training/step.py", "beta=b, alpha=c)", "beta=c, alpha=b)", "test_optimiser.py"),
    Mutant(
        "training/examples.py",
        "torch.randperm(count, generator=order)",
        'torch.randperm(count, generator=seeded(seed, "order"))',
        "test_training_engine.py::test_the_engine_is_the_plain_loop",
    ),
    Mutant(
        "training/examples.py", "first_row=self.first + a", "first_row=self.first", "test_training_engine.py -k parts"
    ),
    Mutant(
        "training/loop.py",
        "islice(batch_order(self.count, self.batch_size, self.seed), first, None)",
        "batch_order(self.count, self.batch_size, self.seed)",
        "test_training_engine.py -k two_halves",
    ),
    Mutant(
        "training/loop.py",
        'self.shares.positions = dict(state["positions"])',
        "self.shares.positions = {}",
        "test_training_engine.py -k two_halves",
    ),
    Mutant(
        "training/loop.py",
        "self.lowest[kind] = math.inf if value is None else float(value)",
        "self.lowest[kind] = math.inf",
        "test_training_engine.py -k best",
    ),
    Mutant(
        "training/loop.py",
        "with torch.no_grad(), self.stepper.average.in_place():",
        "with torch.no_grad():",
        "test_training_engine.py -k validation",
    ),
    Mutant(
        "training/checkpoint.py",
        'if line["step"] <= step]',
        'if line["step"] < step]',
        "test_training_engine.py -k two_halves",
    ),
    Mutant(
        "training/objective.py", "* self.count).long()", "* (self.count - 1)).long()", "test_many_levels.py -k draw"
    ),
    Mutant("training/objective.py", "(2 * drawn - 1)).exp()", "drawn).exp()", "test_many_levels.py -k jitter"),
    # Generation
    Mutant("generation/engine.py", 'purpose="start"', 'purpose="steps"', "test_generate.py -k share_no_number"),
    Mutant("generation/engine.py", "chains, first, purpose=", "chains, purpose=", "test_generate.py -k its_batch"),
    Mutant("generation/engine.py", "first_chain=first,", "first_chain=0,", "test_generate.py -k its_batch"),
    Mutant("generation/engine.py", "(x - low) / (high - low)", "x / high", "test_generate.py -k interval"),
    Mutant(
        "generation/engine.py",
        "if not present.issuperset(batch)",
        "if present.isdisjoint(batch)",
        "test_generate.py -k deleted",
    ),
    Mutant("generation/engine.py", '"seed": engine.seed, ', "", "test_generate.py -k other_settings"),
    Mutant("generation/engine.py", ', "plan": plan_record(engine.plan)', "", "test_generate.py -k another_plan"),
    Mutant(
        "generation/identity.py", "for name in names}", "for name in names[1:]}", "test_generate.py -k another_plan"
    ),
    Mutant(
        "generation/identity.py",
        ", cells, self._code(value)]",
        ", self._code(value)]",
        "test_generate.py -k record_covers",
    ),
    Mutant("generation/identity.py", "value.shape, value.interval", "value.interval", "test_loading.py -k of_one_size"),
    Mutant(
        "generation/restored.py", "operator=operator, y=y", "operator=operator", "test_restore_command.py -k a_call"
    ),
    Mutant("generation/writers.py", "part[done - first :]", "part", "test_generate.py -k another_batch_size"),
    Mutant(
        "generation/writers.py",
        "for number in self._files() if number < count}",
        "for number in range(len(self._files()))}",
        "test_generate.py -k deleted",
    ),
    Mutant("samplers/driver.py", 'purpose="steps"', 'purpose="start"', "test_samplers.py -k share_nothing"),
    # Models and what is fitted by level
    Mutant(
        "models/levels.py",
        "factor = alpha / level.alpha",
        "factor = level.alpha / alpha",
        "test_loading.py -k rescaled",
    ),
    Mutant("models/levels.py", "sigma=factor * level.sigma", "sigma=level.sigma", "test_loading.py -k rescaled"),
    Mutant("models/fits.py", 'notes["digest"] != self.digest', "False", "test_fits.py -k other_weights"),
    Mutant("models/fits.py", "for _, key, table in kept if key == own]", "for _, key, table in kept]", "test_fits.py"),
    Mutant(
        "models/fits.py",
        'return max(found, key=lambda one: one[0]["images"])[1] if',
        'return min(found, key=lambda one: one[0]["images"])[1] if',
        "test_fits.py -k interpolated",
    ),
    Mutant("linalg/modulated.py", "+ 2 * self.log_scales", "+ self.log_scales", "test_modulated.py -k written_out"),
    Mutant(
        "linalg/modulated.py", "(-self.log_scales).exp()", "self.log_scales.exp()", "test_modulated.py -k written_out"
    ),
    Mutant(
        "networks/spectrum_head.py",
        "self.first + self.step * k",
        "self.first - self.step * k",
        "test_modulated.py -k interpolated",
    ),
    # Restoration
    Mutant("generation/restoration.py", "mean_last=False", "mean_last=True", "test_restore.py -k varies_as_much"),
    Mutant(
        "generation/restoration.py", "eta=1.0, midpoint=True", "eta=0.5, midpoint=True", "test_restore.py -k midpoint"
    ),
    Mutant(
        "generation/restoration.py", "eta=1.0, midpoint=True", "eta=1.0, midpoint=False", "test_restore.py -k midpoint"
    ),
    Mutant("generation/restoration.py", "(1, *model.shape), low,", "(1, *model.shape), high,", "test_restore.py"),
    Mutant(
        "lab/inverse_networks.py",
        "/ (1 - 1 / draws)  # v",
        "/ (1 + 1 / draws)  # v",
        "test_inverse_experiment.py -k many",
    ),
]


def passes(test: str, mutant: Mutant | None = None) -> tuple[bool, float]:
    """Whether a test passes on a copy of the package, changed by the mutant if one is given, and how long it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src" / "mmdgs"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "weights").symlink_to(PACKAGE.parents[1] / "weights")
        if mutant is not None:
            changed = copy / mutant.file
            changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        name, *options = test.split()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        paths = os.pathsep.join([str(copy.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, str(TESTS / name), *options],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                cwd=TESTS.parent,
            )
        except subprocess.TimeoutExpired:
            return False, time.perf_counter() - started
    if done.returncode not in (0, 1):  # neither passed nor failed: no such test, or one that cannot be read
        raise RuntimeError(f"{test} could not be run with {mutant}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0, time.perf_counter() - started


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.file or word in m.test for word in words)]
    for mutant in chosen:
        count = (PACKAGE / mutant.file).read_text().count(mutant.old)
        if count != 1:
            print(f"STALE: {mutant.old!r} occurs {count} times in {mutant.file}")
            return 1
    started, missed = time.perf_counter(), 0
    tests = list(dict.fromkeys(mutant.test for mutant in chosen))
    with ThreadPoolExecutor(WORKERS) as pool:
        for test, (passed, _) in zip(tests, pool.map(passes, tests), strict=True):
            if not passed:
                print(f"{test} fails without any mutant")
                return 1
        results = pool.map(passes, [mutant.test for mutant in chosen], chosen)
        for mutant, (passed, seconds) in zip(chosen, results, strict=True):
            missed += passed
            outcome = "MISSED" if passed else "noticed"
            said = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r} ({mutant.test})"
            print(f"{outcome:8} {seconds:5.0f} s  {said}", flush=True)
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(chosen) - missed} of {len(chosen)} mutants noticed in {minutes:.1f} minutes")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
