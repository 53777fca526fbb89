"""Diagnostics of chains: against arviz and closed cases, files, and the page of `mmdgs diagnose`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_readme import ROOT, run_blocks
from torch import Tensor
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.diagnostics import diagnose, read_arrays, read_chain, save_chain, to_arviz
from mmdgs.errors import UsageError
from mmdgs.generation import Method, generate, make_plan
from mmdgs.metrics import autocorrelations, bulk_sample_sizes, mode_coverage, rank_rhat
from mmdgs.models import Model
from mmdgs.models.config import ModelConfig


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autoregressive(phi: float, steps: int, chains: int, d: int = 1) -> Tensor:
    x = [normals(chains, d)]
    for e in normals(steps - 1, chains, d, seed=1):
        x.append(phi * x[-1] + math.sqrt(1 - phi**2) * e)
    return torch.stack(x)


CHAINS = {
    "independent": normals(400, 4, 3),
    "slow": autoregressive(0.95, 401, 3, 2),
    "one chain": autoregressive(0.7, 300, 1, 2),
    "apart": normals(200, 4, 1) + torch.arange(4.0)[:, None],
    "other spreads": normals(200, 4, 1) * torch.tensor([1.0, 1.0, 1.0, 4.0])[:, None],
    "heavy tails": normals(500, 4, 1) / normals(500, 4, 1, seed=2),
    "ties": normals(200, 4, 1).round(),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_rhat_and_sizes_are_those_of_arviz(chain: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        arviz = pytest.importorskip("arviz")
    data = to_arviz(chain)
    if chain.shape[1] > 1:  # arviz gives none of one chain, though its halves can be compared
        assert rank_rhat(chain).numpy() == pytest.approx(arviz.rhat(data)["x"].values, rel=1e-9)
    # arviz scales autocovariances by n, and adds a lone autocorrelation past the last positive pair.
    assert bulk_sample_sizes(chain).numpy() == pytest.approx(arviz.ess(data)["x"].values, rel=0.12)


def test_rhat_of_closed_cases() -> None:
    assert rank_rhat(normals(4000, 4, 1)).item() == pytest.approx(1, abs=2e-3)
    assert rank_rhat(CHAINS["apart"]).item() > 1.3
    assert rank_rhat(CHAINS["other spreads"]).item() > 1.1  # seen by the folded ranks alone
    drift = torch.linspace(0, 10, 200).double()[:, None, None] + normals(200, 4, 1)
    assert rank_rhat(drift).item() > 1.3  # every chain alike: seen since they are split
    assert rank_rhat(torch.ones(20, 2, 1)).isnan().all()


def test_rhat_does_not_change_with_a_monotone_map() -> None:
    chain = CHAINS["slow"][..., :1]
    ranks_alone = rank_rhat(chain), rank_rhat(3 * chain - 7)
    assert torch.allclose(*ranks_alone)
    assert torch.allclose(bulk_sample_sizes(chain), bulk_sample_sizes(chain.exp()))


def test_autocorrelations_of_an_autoregressive_chain() -> None:
    found = autocorrelations(autoregressive(0.8, 20_000, 4), 5)[:, 0]
    assert found.numpy() == pytest.approx([0.8**k for k in range(5)], abs=0.02)


MODES = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], dtype=torch.float64)


def test_all_chains_in_one_mode_are_caught_by_the_modes_alone() -> None:
    stuck = normals(1000, 4, 2) + MODES[0]
    blind, seeing = diagnose(stuck), diagnose(stuck, MODES)
    assert blind.problems == []
    assert "not seen without --modes" in blind.verdict
    assert seeing.problems == ["1 of 2 modes were never visited"]
    assert seeing.coverage is not None
    assert seeing.coverage.distance == 0.5


def test_weights_of_modes_count() -> None:
    share = (torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)) < 0.8).long()
    chain = normals(1000, 4, 2) + MODES[share]
    assert diagnose(chain, MODES, torch.tensor([0.2, 0.8])).problems == []
    assert diagnose(chain, MODES).problems[0].endswith("% of the states are in the wrong mode")
    with pytest.raises(ValueError, match="modes of 3 numbers do not fit states of 2"):
        mode_coverage(chain, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="weights must be 2 numbers"):
        mode_coverage(chain, MODES, torch.ones(3))


def test_bad_chains_are_named() -> None:
    still = torch.cat([normals(500, 4, 1), torch.zeros(500, 4, 1)], 2)
    assert diagnose(still).problems == ["1 of 2 numbers never move"]
    assert diagnose(still).worst(1) == [1]
    slow = diagnose(autoregressive(0.99, 200, 2))
    assert any("effective sample size" in one for one in slow.problems)
    with pytest.raises(UsageError, match=r"floating-point tensor \(steps, chains, ...\), got torch.int64"):
        diagnose(torch.zeros(9, 2, 2, dtype=torch.long))


def test_arviz_gets_chains_first() -> None:
    pytest.importorskip("arviz")
    chain = normals(10, 3, 2, 2)
    assert np.array_equal(to_arviz(chain, "y").posterior["y"].values, chain.movedim(0, 1).numpy())


def test_arviz_is_imported_while_another_process_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("arviz")
    # It renames a file once a day: another process does so between its writing and its renaming.
    program = """
import pathlib, torch
renamed, rename = [], pathlib.Path.replace
def raced(path, target):
    if path.name == "daily_warning.tmp" and not renamed:
        renamed.append(rename(path, target))
    return rename(path, target)
pathlib.Path.replace = raced
from mmdgs.diagnostics import to_arviz
assert to_arviz(torch.zeros(4, 2, 1)).posterior["x"].shape == (2, 4, 1)
print(len(renamed))
"""
    environment = os.environ | {"HOME": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    assert int(made.stdout) <= 1  # no race where arviz announces nothing any more


@pytest.mark.slow  # .ci/run asks the same of the whole suite
def test_tests_leave_the_home_folder_alone(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    # Two workers that both import arviz, and other libraries with caches, where the home folder is empty.
    file = Path(__file__).with_name("test_metrics.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-k", "ess", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert not list(tmp_path.iterdir())


def test_without_arviz_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(UsageError, match=r'pip install "mmdgs\[arviz\]"'):
        to_arviz(normals(10, 2, 1))


def command(*words: object, name: str = "diagnose") -> tuple[int, str]:
    result = CliRunner().invoke(app, [name, *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


def test_one_page(tmp_path: Path) -> None:
    chain = normals(1000, 4, 2) + MODES[0]
    save_chain(tmp_path / "chain.npz", chain.float(), modes=MODES)
    out = tmp_path / "out"
    status, said = command(tmp_path / "chain.npz", "--out", out)
    assert (status, "not converged: 1 of 2 modes were never visited" in said) == (0, True)
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page.replace("http://www.w3.org", "")
    records = json.loads((out / "records.json").read_text())
    assert records["modes"]["missed"] == [1]
    assert records["rhat"] == pytest.approx(rank_rhat(chain.float()).tolist())
    assert command(tmp_path / "chain.npz", "--out", out)[0] == 2
    assert command(tmp_path / "chain.npz", "--out", out, "--overwrite", "--burn-in", 500)[0] == 0
    assert json.loads((out / "records.json").read_text())["steps"] == 500


def test_bad_files_leave_nothing_behind(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "short.npz", samples=np.zeros((3, 2)))
    np.savez(tmp_path / "nan.npz", samples=np.full((20, 2), np.nan))
    np.savez(tmp_path / "words.npz", samples=np.full((20, 2), "a"))
    np.savez(tmp_path / "object.npz", samples=np.array([None, {}], dtype=object))
    np.savez(tmp_path / "modes.npz", samples=np.zeros((20, 2, 3)), modes=np.zeros((2, 2)))
    np.savez(tmp_path / "weights.npz", samples=np.zeros((20, 2)), modes=np.zeros(2), weights=np.array([1.0, -1.0]))
    np.save(tmp_path / "one.npy", np.zeros((20, 2)))
    with zipfile.ZipFile(tmp_path / "inner.npz", "w") as archive:
        archive.writestr("samples.npy", b"not an array")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "nan.npz").read_bytes()[:60])
    expected = {
        "other.npz": "must hold the array 'samples'; it has x",
        "short.npz": "at least 8 steps after the burn-in of 0, got (3, 2)",
        "nan.npz": "'samples' holds numbers that are not finite",
        "words.npz": "must hold real numbers",
        "object.npz": "is not an .npz of arrays",
        "modes.npz": "modes must be (K, *(3,)), as a state is, got (2, 2)",
        "weights.npz": "a number for each mode, none negative",
        "inner.npz": "'samples' must hold real numbers, got bytes",
        "one.npy": "is not an .npz of arrays",
        "cut.npz": "is not an .npz of arrays, or a damaged one",
        "none.npz": "cannot read",
    }
    for name, message in expected.items():
        status, said = command(tmp_path / name, "--out", tmp_path / "out")
        assert status == 2, said
        assert message in said
        assert name in said
    assert not (tmp_path / "out").exists()


def test_a_chain_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    chain = normals(10, 2, 3).float()
    path = save_chain(tmp_path / "chain.npz", chain)
    assert torch.equal(read_arrays(path, ("samples",))["samples"].float(), chain)
    with pytest.raises(UsageError, match=r"ends in \.npz"):
        save_chain(tmp_path / "chain.npy", chain)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope = run_blocks(ROOT / "docs" / "judging.md")
    assert command("chain.npz", "--out", "out")[0] == 0
    assert scope["run"].info["accepted"].shape == (4,)


def test_sample_keeps_chains_that_diagnose_reads(tmp_path: Path) -> None:
    config = ModelConfig(network="mlp", param="clean", shape=(2,), options={"width": 2, "depth": 1}, sigma=0.5)
    model, chain = Model.build(config), tmp_path / "chain.npz"
    words = [model.save_pretrained(tmp_path / "m"), "--n", 3, "--steps", 17, "--device", "cpu"]
    status, said = command(*words, "--chain-every", 2, "--batch-size", 2, "--out", chain, name="sample")
    assert (status, "chains: " in said) == (0, True), said
    plan = make_plan(Method(steps=17), model)
    kept = generate(model, plan, 3, keep=range(2, 18, 2), progress=None).states
    torch.testing.assert_close(read_arrays(chain, ("samples",))["samples"], kept.double(), rtol=1e-5, atol=1e-6)
    assert [path.name for path in tmp_path.glob("*chain*")] == ["chain.npz"]
    assert read_chain(chain)["samples"].shape == (8, 3, 2)  # as `mmdgs diagnose` does
    for more, expected in (
        (["--chain-every", 3, "--out", tmp_path / "b.npz"], "keeps 5 states of the 17 steps"),
        (["--chain-every", 2, "--out", tmp_path / "b.png"], "ends in .npz"),
        (["--chain-every", 2, "--out", tmp_path / "b.npz", "--resume"], "--resume is for samples"),
        (["--chain-every", 2, "--out", chain], "exists; use --overwrite"),
    ):
        status, said = command(*words, *more, name="sample")
        assert status == 2
        assert expected in said
    assert not [*tmp_path.glob("b.*")]
