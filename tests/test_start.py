"""What a start of the library and of the command line loads, and how Ctrl-C ends it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.covariances import COVARIANCES
from mmdgs.metrics.inception_file import ENVIRONMENT
from mmdgs.sampling import SAMPLERS

HEAVY = (
    *("matplotlib", "sklearn", "scipy", "jinja2", "accelerate", "diffusers", "huggingface_hub"),
    *("PIL", "yaml"),
)
"""Imported only where they are used: some are extras, all would slow down every start."""


def printed(program: str, environment: dict[str, str] | None = None) -> str:
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_a_start_loads_what_is_used() -> None:
    program = f"""
import sys
import mmdgs, mmdgs.metrics, mmdgs.data
print('torch' in sys.modules)
mmdgs.data.mog_density, mmdgs.metrics.mmd
print('torch' in sys.modules, 'mmdgs.metrics.features' in sys.modules)
import mmdgs.models, mmdgs.sampling.engine, mmdgs.samplers, mmdgs.evaluation.run
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert printed(program).split() == ["False", "True", "False", "[]"]


def test_every_public_name_is_found() -> None:
    root = Path(mmdgs.__file__).parent
    assert len(mmdgs.__all__) <= 48
    assert (root / "py.typed").is_file()
    for stub in root.rglob("__init__.pyi"):
        if stub.parent.name == "interop":  # of libraries that need not be installed
            continue
        name = ".".join(["mmdgs", *stub.parent.relative_to(root).parts])
        package = importlib.import_module(name)
        assert [name for name in dir(package) if not hasattr(package, name)] == []
        assert dir(package) == package.__all__  # and no leftovers of imports
        assert not hasattr(package, "nothing")


def commands() -> list[list[str]]:
    """The words of every command, those of groups too."""
    group = typer.main.get_command(cli.app)
    words = [[]]
    for name, command in group.commands.items():
        words += [[name], *([name, inner] for inner in getattr(command, "commands", ()))]
    return words


def test_help_of_every_command_needs_no_torch() -> None:
    asked = [*([*words, "--help"] for words in commands()), ["--version"]]
    program = f"""
import sys
from typer.testing import CliRunner
from mmdgs import cli
from mmdgs.covariances import COVARIANCES
results = [CliRunner().invoke(cli.app, words) for words in {asked}]
print([result.exit_code for result in results if result.exit_code or len(result.output) < 10])
print([name for name in {("torch", "numpy", *HEAVY)} if name in sys.modules])
"""
    assert len(asked) > 10
    assert printed(program).split() == ["[]", "[]"]


def test_help_names_all_there_is() -> None:
    named = {
        "sample": [*SAMPLERS, *COVARIANCES, "--quiet"],
        "evaluate": [*mmdgs.evaluation.METRICS, ENVIRONMENT, "--quiet"],
        "train": ["--learning-rate", "--quiet"],
    }
    for command, words in named.items():
        text = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "300"}).output
        assert [word for word in words if word not in text] == []
    assert torch.__version__ in CliRunner().invoke(cli.app, ["--version"]).output


@pytest.mark.parametrize(
    ("words", "after"), [(["--help"], 0.15), (["bench", "chain"], 0.15), (["bench", "chain"], 1.0)]
)
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
    _, text = started.communicate(timeout=60)
    if words == ["--help"] and started.returncode in (0, -signal.SIGINT):
        assert text == ""  # it was faster, or on its way out
    else:
        assert (started.returncode, text.strip()) == (130, "stopped")


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
    assert printed(program, environment).split()[-1] == (own or "PASSIVE")
