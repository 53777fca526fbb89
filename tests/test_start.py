"""What a start of the library and of the command line loads, and how Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.generation import SAMPLERS
from mmdgs.generation.settings import FIXED
from mmdgs.metrics.inception_file import ENVIRONMENT
from mmdgs.models import COVARIANCES

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
import mmdgs.models, mmdgs.generation.engine, mmdgs.samplers, mmdgs.evaluation.run
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert printed(program).split() == ["False", "True", "False", "[]"]


def test_every_public_name_is_found() -> None:
    for package in (mmdgs, mmdgs.metrics, mmdgs.data, mmdgs.generation, mmdgs.training, mmdgs.evaluation):
        missing = [name for name in package.__all__ if not hasattr(package, name)]
        assert missing == []
        assert set(package.__all__) <= set(dir(package))
    assert not hasattr(mmdgs.metrics, "nothing")


def commands() -> list[list[str]]:
    """The words of every command, those of groups too."""
    group = typer.main.get_command(cli.app)
    found = [[]]
    for name, one in group.commands.items():
        found += [[name], *([name, inner] for inner in getattr(one, "commands", ()))]
    return found


def test_help_of_every_command_needs_no_torch() -> None:
    asked = [*([*words, "--help"] for words in commands()), ["--version"]]
    program = f"""
import sys
from typer.testing import CliRunner
from mmdgs import cli
results = [CliRunner().invoke(cli.app, words) for words in {asked}]
print([result.exit_code for result in results if result.exit_code or len(result.output) < 10])
print([name for name in {("torch", "numpy", *HEAVY)} if name in sys.modules])
"""
    assert len(asked) > 10
    assert printed(program).split() == ["[]", "[]"]


def test_help_names_all_there_is() -> None:
    told = {name: CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "300"}).output for name in HELP}
    for name, words in HELP.items():
        assert [word for word in words if word not in told[name]] == []
    assert torch.__version__ in CliRunner().invoke(cli.app, ["--version"]).output


HELP = {
    "sample": [*SAMPLERS, *COVARIANCES, *FIXED, "--quiet"],
    "evaluate": [*mmdgs.evaluation.METRICS, ENVIRONMENT, "--quiet"],
    "train": ["--learning-rate", "--quiet"],
    "reproduce": ["table1", "--quiet"],
}


@pytest.mark.parametrize("words", [["--help"], ["bench", "chain"]], ids=["help", "command"])
@pytest.mark.parametrize("after", [0.15, 0.4, 1.0])
def test_an_interrupt_at_the_start_shows_no_traceback(words: list[str], after: float) -> None:
    program = f"""
import sys
sys.argv = ['mmdgs', *{words}]
from mmdgs.__main__ import main
print('started', flush=True)
main()
"""
    # A shell in the background ignores SIGINT for its jobs, and they for theirs.
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline() == "started\n"
    time.sleep(after)
    os.kill(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    if words == ["--help"] and started.returncode in (0, -signal.SIGINT):
        assert said == ""  # it was faster, or on its way out
    else:
        assert (started.returncode, said.strip()) == (130, "stopped")


@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(own: str | None) -> None:
    program = """
import os, sys
sys.argv = ['mmdgs', '--version']
from mmdgs.__main__ import main
try:
    main()
except SystemExit:
    print(os.environ['OMP_WAIT_POLICY'])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == (own or "PASSIVE")
