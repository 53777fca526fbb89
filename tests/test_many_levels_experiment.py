"""The experiment on samplers over many levels: its exact recursion against chains, its records, its
pages.
"""

from __future__ import annotations

import json

import pytest
import torch

from experiments import EXPERIMENTS, Context, Workspace, many_levels
from mmdgs.moments import FullMoments
from mmdgs.randomness import seeded
from mmdgs.samplers import gibbs_plan, run
from mmdgs.schedules import geometric
from mmdgs.targets import GaussianMixture

TINY = many_levels.ManyLevelSettings(counts=(4, 8), chains=60, groups=2)


@pytest.mark.parametrize("noise_first", [True, False])
@pytest.mark.parametrize("sweeps", [1, 3])
def test_the_variance_of_gibbs_sweeps_is_that_of_its_chains(noise_first: bool, sweeps: int) -> None:
    target = GaussianMixture([1.0], torch.zeros(1, 1, dtype=torch.float64), 1.0)
    levels = geometric(10, many_levels.FIRST, many_levels.LAST)
    plan = gibbs_plan(
        FullMoments(target.denoiser()), levels, sweeps=sweeps, noise_first=noise_first
    )
    x0 = target.noised(levels[0]).sample((40_000,), generator=seeded(0))
    found = run(plan, x0, progress=None).x.var().item()
    exact = many_levels._gibbs_variance(levels, sweeps, noise_first)
    assert found == pytest.approx(exact, rel=5 * (2 / 40_000) ** 0.5)
    if not noise_first:
        assert exact == pytest.approx(
            1, abs=2e-3
        )  # the bridges are exact, and the last mean narrows by sigma^2
    else:
        assert exact > 1.03


@pytest.mark.parametrize("sweeps", [1, 3, 10])
def test_the_papers_order_has_a_limit_that_levels_do_not_mend(sweeps: int) -> None:
    """With close levels K sweeps solve dv/ds = 2 K (v / (1 + s) - 1), s = sigma^2: v(0) = 1 + 1 /
    (2 K - 1).
    """
    found = many_levels._gibbs_variance(geometric(20_000, 100.0, 0.001), sweeps, noise_first=True)
    assert found - 1 == pytest.approx(1 / (2 * sweeps - 1), rel=0.01)


@pytest.mark.parametrize("sweeps", [1, 3, 10])
@pytest.mark.parametrize("sigma", [50.0, 3.0, 1.0, 0.5])
def test_the_limit_depends_on_the_starting_noise_where_it_does_not_dwarf_the_data(
    sweeps: int, sigma: float
) -> None:
    """The solution of that equation from noise alone, v(sigma^2) = sigma^2, as docs/use/sample.md
    has it.
    """
    found = many_levels._gibbs_variance(
        geometric(20_000, sigma, 0.001), sweeps, noise_first=True, start=0.0
    )
    bias, r = 1 / (2 * sweeps - 1), 1 / (1 + sigma**2)
    assert found - 1 == pytest.approx(bias - (bias + r) * r ** (2 * sweeps - 1), abs=1e-3)


def test_it_writes_its_numbers_and_figures(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(many_levels, "FIT_POINTS", 200)
    monkeypatch.setattr(many_levels, "LIKELY_DRAWS", 2_000)
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"), settings=TINY)
    EXPERIMENTS["many-levels"].perform(context)
    records = json.loads((tmp_path / "out" / "records.json").read_text())
    four, two = (
        {(r["row"], r["levels"]): r for r in found} for found in records["samplers"].values()
    )
    assert {row for row, _ in four} == set(many_levels.SAMPLERS)
    assert {row for row, _ in two} == set(many_levels.SAMPLERS) - {many_levels.FULL_ROW}
    assert all(len(r["mmd"]) == len(r["deficit"]) == 2 for r in four.values())
    # What a sampler costs: two sweeps more a level, probes as two evaluations each, and the last
    # mean.
    assert (
        four["Gibbs (paper)", 8]["evaluations"] == 3 * 7 * (1 + 2 * min(many_levels.PROBES, 2)) + 1
    )  # two numbers: two products
    assert two["Langevin", 4]["evaluations"] == 5 * 4 + 1
    # DDPM's fixed variances stand on either side of the truth where steps are few.
    assert two["ancestral, small", 4]["deficit"][0] < 0 < two["ancestral, large", 4]["deficit"][0]
    assert {f.name for f in (tmp_path / "out").glob("*.png")} == {
        "many_levels.png",
        "many_levels_order.png",
    }
    assert [claim["holds"] for claim in records["claims"]] == [True] * 3
