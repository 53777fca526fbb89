"""What a start of the library loads."""

from __future__ import annotations

import subprocess
import sys

import mmdgs

HEAVY = ("matplotlib", "sklearn", "scipy", "jinja2", "accelerate", "diffusers", "huggingface_hub", "PIL", "yaml")
"""Imported only where they are used: some are extras, all would slow down every start."""


def printed(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_start_loads_what_is_used() -> None:
    program = f"""
import sys
import mmdgs, mmdgs.metrics, mmdgs.data
print('torch' in sys.modules)
mmdgs.data.mog_density, mmdgs.metrics.mmd
print('torch' in sys.modules, 'mmdgs.metrics.features' in sys.modules)
import mmdgs.models, mmdgs.generation, mmdgs.samplers, mmdgs.evaluation
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert printed(program).split() == ["False", "True", "False", "[]"]


def test_every_public_name_is_found() -> None:
    for package in (mmdgs, mmdgs.metrics, mmdgs.data):
        missing = [name for name in package.__all__ if not hasattr(package, name)]
        assert missing == []
        assert set(package.__all__) <= set(dir(package))
    assert not hasattr(mmdgs.metrics, "nothing")
