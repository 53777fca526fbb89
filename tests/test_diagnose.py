"""Diagnostics of chains: against arviz and closed cases, files, the page of `mmdgs diagnose`."""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from oracles import normals
from test_readme import ROOT, run_blocks
from torch import Tensor
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.diagnostics import diagnose, read_arrays, read_chain, save_chain, to_arviz
from mmdgs.errors import UsageError
from mmdgs.metrics import (
    autocorrelations,
    bulk_sample_sizes,
    effective_sample_size,
    mode_coverage,
    rank_rhat,
)
from mmdgs.models import Model
from mmdgs.models.config import ModelConfig
from mmdgs.sampling import SamplerSettings, generate, make_plan


def autoregressive(phi: float, steps: int, chains: int, d: int = 1) -> Tensor:
    """Stationary chains x' = phi x + e of unit variance, (steps, chains, d)."""
    x = [normals(chains, d)]
    for e in normals(steps - 1, chains, d, seed=1):
        x.append(phi * x[-1] + math.sqrt(1 - phi**2) * e)
    return torch.stack(x)


def wavy(steps: int, chains: int) -> Tensor:
    """A slow chain with a damped swing on it: its autocorrelations stay positive, but do not fall
    monotonically.
    """
    noise = normals(steps, chains, 1, seed=1)
    swing = [noise[0], noise[1]]
    for e in noise[2:]:
        swing.append(1.8 * swing[-1] - 0.95 * swing[-2] + e)
    return autoregressive(0.97, steps, chains) + 0.1 * torch.stack(swing)


CHAINS = {
    "independent": normals(400, 4, 3),
    "slow": autoregressive(0.95, 401, 3, 2),
    "one chain": autoregressive(0.7, 300, 1, 2),
    "apart": normals(200, 4, 1) + torch.arange(4.0)[:, None],
    "other spreads": normals(200, 4, 1) * torch.tensor([1.0, 1.0, 1.0, 4.0])[:, None],
    "heavy tails": normals(500, 4, 1) / normals(500, 4, 1, seed=2),
    "ties": normals(200, 4, 1).round(),
}


@pytest.fixture
def arviz() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it announces its next version at import
        return pytest.importorskip("arviz")


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_rhat_and_sizes_are_those_of_arviz(chain: Tensor, arviz: ModuleType) -> None:
    data = to_arviz(chain)
    if chain.shape[1] > 1:  # arviz gives none of one chain, though its halves can be compared
        assert rank_rhat(chain).numpy() == pytest.approx(arviz.rhat(data)["x"].values, rel=1e-9)
    # arviz scales autocovariances by n, and adds a lone autocorrelation past the last positive
    # pair.
    assert bulk_sample_sizes(chain).numpy() == pytest.approx(arviz.ess(data)["x"].values, rel=0.12)


@pytest.mark.parametrize(
    ("chain", "tolerance"),
    [
        (autoregressive(0.5, 2000, 1), 3e-3),
        (autoregressive(0.9, 2000, 4), 3e-3),
        (wavy(2000, 1), 3e-3),
        (wavy(2000, 4), 3e-3),
        (autoregressive(0.0, 2000, 4), 0.05),
        (autoregressive(-0.4, 2000, 1), 0.1),
    ],
)
def test_the_effective_sample_size_is_that_of_arviz(
    chain: Tensor, tolerance: float, arviz: ModuleType
) -> None:
    # arviz scales autocovariances by n where we scale by n - 1: some parts in a thousand. It also
    # adds one lone autocorrelation past the last positive pair, of a size up to 2 / sqrt(n): next
    # to an autocorrelation time of 1 or less that is some per cent, next to a long one nothing.
    theirs = float(arviz.ess(chain[..., 0].mT.numpy(), method="mean"))
    halves = torch.cat(chain.chunk(2), dim=1)  # side by side, as arviz takes them
    assert effective_sample_size(halves) == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("phi", [0.0, 0.9, -0.4])
def test_the_effective_sample_size_of_an_autoregressive_chain(phi: float) -> None:
    # Known: n (1 - phi) / (1 + phi). The estimate's own error at 80,000 draws is some per cent.
    chain = autoregressive(phi, steps=5_000, chains=16)
    expected = 80_000 * (1 - phi) / (1 + phi)
    assert effective_sample_size(chain) == pytest.approx(expected, rel=0.1)


def test_the_effective_sample_size_is_that_of_the_worst_coordinate() -> None:
    slow, fast = autoregressive(0.9, 2000, 2), autoregressive(0.1, 2000, 2)
    worst = effective_sample_size(slow)
    for chain in (torch.cat([slow, fast], dim=2), torch.cat([fast, slow], dim=2)):
        assert effective_sample_size(chain[..., None]) == pytest.approx(worst)
        chain[..., 1] = 1.0  # never moves
        assert math.isnan(effective_sample_size(chain))


def test_the_effective_sample_size_of_chains_stuck_in_different_modes_is_low() -> None:
    # Each chain looks perfect by itself; together they are worth about one draw each.
    assert effective_sample_size(normals(1000, 4, 1) + 20 * torch.arange(4.0)[:, None]) < 8


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
    correlations = autocorrelations(autoregressive(0.8, 20_000, 4), 5)[:, 0]
    assert correlations.numpy() == pytest.approx([0.8**k for k in range(5)], abs=0.02)


MODES = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], dtype=torch.float64)


def test_every_state_is_in_its_nearest_mode() -> None:
    modes = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 50.0]])
    labels = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0], [0, 1, 1]])  # steps, chains
    coverage = mode_coverage(modes[labels] + 0.3, modes)
    assert coverage.weights == pytest.approx([5 / 15, 10 / 15, 0.0])
    assert (coverage.switches, coverage.missed) == ([2, 0, 4], [2])


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
    with pytest.raises(ValueError, match="modes of 3 numbers"):
        mode_coverage(chain, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="weights must be 2 numbers"):
        mode_coverage(chain, MODES, torch.ones(3))


def test_the_least_effective_size_of_each_chain_adds_up() -> None:
    """100 a chain: 60 independent states of each of four chains are too few, 300 are enough."""
    for steps, few in ((60, True), (300, False)):
        problems = diagnose(normals(steps, 4, 1)).problems
        assert any("effective sample size" in problem for problem in problems) == few


def test_bad_chains_are_named() -> None:
    still = torch.cat([normals(500, 4, 1), torch.zeros(500, 4, 1)], 2)
    assert diagnose(still).problems == ["1 of 2 numbers never move"]
    assert diagnose(still).worst(1) == [1]
    slow = diagnose(autoregressive(0.99, 200, 2))
    assert any("effective sample size" in problem for problem in slow.problems)
    with pytest.raises(UsageError, match=r"floating-point .* got torch.int64"):
        diagnose(torch.zeros(9, 2, 2, dtype=torch.long))


def test_arviz_gets_chains_first() -> None:
    pytest.importorskip("arviz")
    chain = normals(10, 3, 2, 2)
    assert np.array_equal(to_arviz(chain, "y").posterior["y"].values, chain.movedim(0, 1).numpy())


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
    samples = np.zeros((20, 2))
    files: dict[str, tuple[dict[str, object], str]] = {
        "other": ({"x": samples}, "'samples'; it has x"),
        "short": ({"samples": samples[:3]}, "got (3, 2)"),
        "nan": ({"samples": samples * np.nan}, "not finite"),
        "words": ({"samples": np.full((20, 2), "a")}, "real numbers"),
        "object": ({"samples": np.array([None, {}], dtype=object)}, "is not an .npz"),
        "modes": ({"samples": np.zeros((20, 2, 3)), "modes": np.zeros((2, 2))}, "got (2, 2)"),
        "weights": ({"samples": samples, "modes": np.zeros(2), "weights": [1, -1]}, "weights"),
        "none": ({}, "cannot read"),
        "cut": ({}, "is not an .npz"),
        "inner": ({}, "got bytes"),
    }
    for name, (contents, _) in files.items():
        if contents:
            np.savez(tmp_path / f"{name}.npz", **contents)
    with zipfile.ZipFile(tmp_path / "inner.npz", "w") as archive:
        archive.writestr("samples.npy", b"not an array")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "nan.npz").read_bytes()[:60])
    for name, (_, message) in files.items():
        status, said = command(tmp_path / f"{name}.npz", "--out", tmp_path / "out")
        assert status == 2, said
        assert message in said
        assert f"{name}.npz" in said
    assert not (tmp_path / "out").exists()


def test_a_chain_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    chain = normals(10, 2, 3).float()
    path = save_chain(tmp_path / "chain.npz", chain)
    assert torch.equal(read_arrays(path, ("samples",))["samples"].float(), chain)
    with pytest.raises(UsageError, match=r"ends in \.npz"):
        save_chain(tmp_path / "chain.npy", chain)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope = run_blocks(ROOT / "docs" / "use" / "judge.md")
    assert command("chain.npz", "--out", "out")[0] == 0
    assert scope["run"].info["accepted"].shape == (4,)


def test_sample_keeps_chains_that_diagnose_reads(tmp_path: Path) -> None:
    config = ModelConfig(
        network="mlp", param="clean", shape=(2,), options={"width": 2, "depth": 1}, sigma=0.5
    )
    model, chain = Model.build(config), tmp_path / "chain.npz"
    words = [model.save_pretrained(tmp_path / "m"), "--n", 3, "--steps", 17, "--device", "cpu"]
    status, said = command(
        *words, "--chain-every", 2, "--batch-size", 2, "--out", chain, name="sample"
    )
    assert (status, "chains: " in said) == (0, True), said
    plan = make_plan(SamplerSettings(steps=17), model)
    kept = generate(model, plan, 3, keep=range(2, 18, 2), progress=None).states
    torch.testing.assert_close(
        read_arrays(chain, ("samples",))["samples"], kept.double(), rtol=1e-5, atol=1e-6
    )
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
