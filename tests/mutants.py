"""`make mutants`: does the suite notice a broken formula? Each mutant changes one place; its test
must then fail.

`mutants.txt` lists them: a line `FILE: TEST` (a file of the package; a test file, with `::test` or
`-k "words"` to choose among its tests), and below it `OLD => NEW`, where the file holds OLD exactly
once. Every test must pass without a mutant first. The package is copied each time, so the source
tree is never touched.

    python tests/mutants.py [WORD ...]      only mutants with one of the words in their file or test
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "src" / "mmdgs"
PYTEST = (sys.executable, "-m", "pytest", "-xqp", "no:cacheprovider", "-m", "not slow and not gpu")
WORKERS = 2
LIMIT = 600
"""Seconds that tests may take: a mutant that hangs is one that was noticed."""


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    test: str

    def places(self) -> int:
        """How often the text that is changed stands in its file."""
        return (PACKAGE / self.file).read_text().count(self.old)


def read_mutants() -> Iterator[Mutant]:
    """The mutants of `mutants.txt`; a line that begins with `=>` goes on with the one before."""
    file = test = ""
    for line in (TESTS / "mutants.txt").read_text().replace("\n        =>", " =>").splitlines():
        if line.startswith("    "):
            old, _, new = line.partition(" =>")
            yield Mutant(file, old.strip(), new.strip(), test)
        elif not line.startswith("#"):
            file, test = line.split(": ")


def passes(test: str, mutant: Mutant | None = None) -> tuple[bool, float]:
    """Whether a test passes on a copy of the package with a mutant in it, and after how long."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src" / "mmdgs"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "weights").symlink_to(PACKAGE.parents[1] / "weights")
        if mutant is not None:
            changed = copy / mutant.file
            changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        name, *options = shlex.split(test)
        paths = os.pathsep.join([str(copy.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command, how = [*PYTEST, str(TESTS / name), *options], {"env": environment, "text": True}
        try:
            ended = subprocess.run(
                command, **how, capture_output=True, timeout=LIMIT, cwd=TESTS.parent
            )
        except subprocess.TimeoutExpired:
            return False, time.perf_counter() - started
    if ended.returncode not in (0, 1):  # no such test, or one that cannot be read
        raise RuntimeError(f"{test} could not be run with {mutant}:\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 0, time.perf_counter() - started


def main(words: list[str]) -> int:
    mutants = [
        mutant
        for mutant in read_mutants()
        if not words or any(word in mutant.file or word in mutant.test for word in words)
    ]
    stale = [mutant for mutant in mutants if mutant.places() != 1]
    if stale:
        print("STALE:", *stale, sep="\n")
        return 1
    started, missed = time.perf_counter(), 0
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    with ThreadPoolExecutor(WORKERS) as pool:
        for test, (passed, _) in zip(tests, pool.map(passes, tests), strict=True):
            if not passed:
                print(f"{test} fails without any mutant")
                return 1
        results = pool.map(passes, [mutant.test for mutant in mutants], mutants)
        for mutant, (passed, seconds) in zip(mutants, results, strict=True):
            missed += passed
            outcome = "MISSED" if passed else "noticed"
            change = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r} ({mutant.test})"
            print(f"{outcome:8} {seconds:5.0f} s  {change}", flush=True)
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(mutants) - missed} of {len(mutants)} mutants noticed in {minutes:.1f} minutes")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
