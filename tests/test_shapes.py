"""The shape annotations of the public functions, checked at run time while other tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = (
    "test_targets.py", "test_posterior.py", "test_losses_training.py", "test_moments.py",
    "test_metrics.py", "test_krylov.py",
)  # fmt: skip

CHECKED = """
import sys
from importlib.util import find_spec
from pathlib import Path

from jaxtyping import TypeCheckError, install_import_hook

# All but two: beartype checks no `Self` of a method, and no protocol that is for type checkers
# alone. For good: most are imported when first used.
names = {path.stem for path in Path(find_spec("mmdgs").origin).parent.iterdir()}
names -= {"__init__", "runtime", "training"}
install_import_hook([f"mmdgs.{name}" for name in sorted(names)], "beartype.beartype")

import pytest
import torch

import mmdgs

# The check must be at work, or tests that pass show nothing.
with pytest.raises(TypeCheckError):
    mmdgs.moments.higher_moments(
        lambda x_t, level: x_t, torch.zeros(1, 2), mmdgs.NoiseLevel(1.0), torch.zeros(2)
    )
sys.exit(pytest.main(["-xq", "--assert=plain", "-p", "no:xdist", "-m", "not slow", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_annotations_hold_in_other_tests() -> None:
    command = [sys.executable, "-c", CHECKED, *FILES]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
