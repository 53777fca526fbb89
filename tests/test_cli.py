"""The command line as a user meets it: help, tables, exit statuses and messages without tracebacks."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.cli.reproduce import called
from mmdgs.errors import NonFiniteError
from mmdgs.files import LOCK
from mmdgs.lab import bench, toys

run = CliRunner().invoke


def said(result):
    """All a user saw, with line breaks folded."""
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    "words", [[], ["evaluate"], ["reproduce"], ["demo"], ["convert"], ["bench"], ["bench", "chain"]]
)
def test_help_reads_well_at_every_level(words):
    result = run(cli.app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "Traceback" not in result.output


def test_version():
    assert said(run(cli.app, ["--version"])).startswith("mmdgs 0.")


@pytest.mark.usefixtures("tiny", "unpainted")
def test_demo_prints_its_table_its_takeaway_the_path_of_the_report_and_the_next_command(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    result = run(cli.app, ["demo", "--out", str(tmp_path / "d"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "analytic full" in result.output
    assert "nats less likely than data" in " ".join(result.output.split())
    *_, report, following = result.output.strip().splitlines()
    assert report == f"report: {tmp_path / 'd' / 'report.html'}"
    assert following.startswith("next: mmdgs sample mnist ")
    assert (tmp_path / "d" / "report.html").exists()


def test_the_next_command_has_the_path_of_mmdgs_where_the_environment_is_not_active(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / ".venv" / "bin" / "mmdgs"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    assert called() == ".venv/bin/mmdgs"
    script.unlink()
    assert called() == "mmdgs"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "fig9"], "unknown experiment 'fig9' (did you mean 'fig2'?); choose one of fig1, table1"),
        (["reproduce", "table1", "--data", "moons"], "unknown 2-D data set 'moons'; choose one of mog, rings, roll"),
        (["reproduce", "fig1", "--data", "mog"], "--data is for table1 and fig2"),
        (["reproduce", "theory", "--seeds", "3"], "--seeds is for table1, fig2, digs and table2, not for theory"),
        (["reproduce", "mnist", "--images", "9"], "calibration, cifar10, table2 and celeba, not for mnist"),
        (["reproduce", "table2", "--many", "x"], "--many is for calibration and cifar10, not for table2"),
        (["reproduce", "table2", "--only", "nut"], "--only must be a row of the table (Langevin; Gibbs (paper);"),
        (
            ["reproduce", "cifar10", "--only", "Heun"],
            "--only is for inverse, digs, few-steps, covariances, components, calibration and table2, not for cifar10",
        ),
        (["reproduce", "celeba", "--classifier", "x"], "--classifier is for cifar10, not for celeba"),
        (["reproduce", "fig1", "--seed", "-1"], "--seed"),
        (["reproduce", "fig1", "--device", "meta"], "device 'meta' cannot be used here"),
        (["reproduce", "fig1", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["reproduce", "table1", "--seeds", "0"], "--seeds"),
        (["reproduce", "fig1", "--overwrite", "--resume"], "choose one of --overwrite"),
        (["reproduce"], "Missing argument"),
        (["bench", "speed"], "No such command 'speed'"),
    ],
)
def test_misuse_is_status_2_and_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run(cli.app, words)
    assert result.exit_code == 2
    folded = said(result).replace("│ ", "").replace(" │", "")
    assert message in folded
    assert "Traceback" not in result.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_the_extra_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name == "mmdgs.lab.fig1" or name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(cli.app, ["reproduce", "fig1", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert 'this command needs matplotlib; install it with: pip install "mmdgs[lab]"' in said(result)


@pytest.mark.usefixtures("tiny", "unpainted")
def test_a_folder_that_is_not_empty_needs_overwrite(tmp_path):
    words = ["reproduce", "fig1", "--quick", "--out", str(tmp_path), "--device", "cpu"]
    (tmp_path / "notes.txt").write_text("mine")
    result = run(cli.app, words)
    assert result.exit_code == 2
    assert "is not empty" in said(result)
    assert {p.name for p in tmp_path.iterdir()} <= {"notes.txt", LOCK}
    assert run(cli.app, [*words, "--overwrite"]).exit_code == 0
    assert (tmp_path / "records.json").exists()


@pytest.mark.usefixtures("tiny")
def test_failure_is_status_1_and_debug_shows_where(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise NonFiniteError("denoising mean", [3], 7)

    monkeypatch.setattr(toys, "run", broken)
    words = ["reproduce", "table1", "--quick", "--out", str(tmp_path), "--device", "cpu"]
    result = run(cli.app, words)
    assert result.exit_code == 1
    assert "the denoising mean is not finite at step 7, chain 3" in said(result)
    assert "Traceback" not in result.output
    assert not (tmp_path / "records.json").exists()
    assert not (tmp_path / "report.html").exists()
    assert "Traceback" in run(cli.app, [*words, "--resume", "--debug"]).output


@pytest.mark.usefixtures("tiny")
def test_interrupting_says_how_to_resume(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(toys, "run", interrupted)
    words = ["reproduce", "table1", "--quick", "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = run(cli.app, words)
    assert result.exit_code == 130
    assert "--resume" in said(result)
    assert (tmp_path / "out" / "parts" / "mog-energy-0.json").exists()
    assert not (tmp_path / "out" / "records.json").exists()


@pytest.mark.slow
def test_control_c_in_the_terminal_leaves_finished_parts_and_no_traceback(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mmdgs", "reproduce", "table1", "--quick", "--data", "rings", "--out", str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # As in a terminal, also where the tests run in the background of a shell, which ignores it for its children.
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


def test_bench_prints_ratios_and_json(monkeypatch):
    monkeypatch.setattr(bench, "chain", lambda device, quick: [bench.Row("work", "steps/s", 100.0, 250.0)])
    assert "2.5x" in said(run(cli.app, ["bench", "chain", "--device", "cpu"]))
    found = json.loads(run(cli.app, ["bench", "chain", "--device", "cpu", "--json"]).output)
    assert found["rows"][0]["ratio"] == 2.5
    assert found["device"] == "cpu"


@pytest.mark.usefixtures("tiny", "unpainted")
def test_odd_paths_are_shown_as_they_are_and_a_set_named_twice_counts_once(tmp_path):
    out = tmp_path / "a[red]b"
    words = ["reproduce", "fig2", "--quick", "--data", "rings", "--data", "rings", "--out", str(out), "--device", "cpu"]
    result = run(cli.app, words)
    assert result.exit_code == 0, result.output
    assert result.output.strip().splitlines()[-1] == f"report: {out / 'report.html'}"
    assert [one["data"] for one in json.loads((out / "records.json").read_text())["single_chains"]] == ["rings"] * 5
