"""The command line as a user meets it: help, tables, exit statuses, messages, no tracebacks."""

import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.cli.reports import called
from mmdgs.files import LOCK

run = CliRunner().invoke


def test_the_next_command_has_the_path_of_mmdgs_where_the_environment_is_not_active(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / ".venv" / "bin" / "mmdgs"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    assert called() == ".venv/bin/mmdgs"
    script.unlink()
    assert called() == "mmdgs"


def test_without_the_extra_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("mmdgs.demo", "matplotlib."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(cli.app, ["demo", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert 'needs matplotlib; install it with: pip install "mmdgs[report]"' in " ".join(
        result.output.split()
    )


@pytest.mark.slow
def test_control_c_in_the_terminal_leaves_finished_parts_and_no_traceback(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "mmdgs", "demo", "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # As in a terminal, also where the tests run in the background of a shell, which ignores it
        # for its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while not (out / "parts" / "rings-energy-0.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert (out / "parts" / "rings-energy-0.safetensors").exists()
    assert {path.name for path in out.rglob(".*")} <= {LOCK}  # no temporary file stays behind
