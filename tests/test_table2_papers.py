"""FIDs of many seeds: no seed is sampled twice, several runs are put together, and the docs' tables take them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed, picture_folder, resumed, use_fake_inception
from nets import random_images
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, save
from mmdgs.data import image_set
from mmdgs.errors import UsageError
from mmdgs.lab import Context, TimeIsUp, Workspace, sampler_cells, table2
from mmdgs.lab.sampler_cells import Judge, References, Sampling
from mmdgs.lab.table2_papers import ManySeeds
from mmdgs.metrics import frechet_distance
from mmdgs.metrics.features import image_features

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TINY = replace(
    table2.QUICK, images=4, seeds=2, levels=3, langevin_steps=1, tuning_images=2, fit_images=4, reference_limit=None,
    metrics=("fid",), probes=1, heun=(2,), rate_factors=(1.0, 2.0),
)  # fmt: skip
SHAPE = (3, 8, 8)
ROOT = Path(__file__).parents[1]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny network, a folder of images in the place of CIFAR-10, a fake Inception; two images a seed."""
    save(many_level_model(SHAPE), tmp_path / "model")
    monkeypatch.setattr(table2, "DATA", str(picture_folder(tmp_path / "images")))
    monkeypatch.setattr(table2, "FULL", TINY)
    use_fake_inception(tmp_path, monkeypatch)
    workspace = Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), model=str(tmp_path / "model"), only=("Heun",))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that are sampled, in their order."""
    generate, seeds = sampler_cells.generate, []

    def watched(*args: Any, seed: int, **rest: Any) -> Any:
        seeds.append(seed)
        return generate(*args, seed=seed, **rest)

    monkeypatch.setattr(sampler_cells, "generate", watched)
    return seeds


def test_no_seed_is_sampled_twice_when_a_run_is_stopped_and_goes_on_to_more_images(
    prepared: Context, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def stopped(self: Context) -> None:
            if len(sampled) == 3:
                raise TimeIsUp

        patch.setattr(Context, "check_time", stopped)
        records, report = performed("table2", replace(prepared, most_images=10))
        assert sampled == [0, 1, 2]
        assert [one["first images"] for one in records["papers"]] == [4]  # of the table's own two seeds
        assert "Not finished yet, which --resume does: Heun, 8; Heun, 10." in report.sections[1].text
    records, _ = performed("table2", resumed(prepared, most_images=10))
    assert sampled == [0, 1, 2, 3, 4]
    assert [one["first images"] for one in records["papers"]] == [4, 8, 10]
    assert not list((prepared.workspace.out / "parts").glob("*.npz"))
    more, _ = performed("table2", resumed(prepared, most_images=14))
    assert sampled == [0, 1, 2, 3, 4, 5, 6]
    assert [one["first images"] for one in more["papers"]] == [4, 8, 14]
    assert more["papers"][:2] == records["papers"][:2]


def test_runs_that_leave_seeds_to_each_other_make_what_one_run_makes(
    prepared: Context, sampled: list[int], tmp_path: Path
) -> None:
    whole, _ = performed("table2", replace(prepared, most_images=12))
    first = replace(prepared, workspace=Workspace(tmp_path / "first"), most_images=6)
    performed("table2", first)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for file in (tmp_path / "second" / "parts").glob("seed-*.safetensors"):
        file.unlink()  # too large to be taken along
    del sampled[:]
    second = replace(prepared, workspace=Workspace(tmp_path / "second", resume=True), most_images=12)
    records, report = performed("table2", replace(second, skip_seeds=3))
    assert sampled == [3, 4, 5]
    assert [one["first images"] for one in records["papers"]] == [4]  # which was measured before
    assert "Not finished yet, which --resume does: Heun, 8; Heun, 12." in report.sections[1].text
    for file in (tmp_path / "second" / "parts").glob("seed-*.safetensors"):
        shutil.copy(file, tmp_path / "first" / "parts")
        shutil.copy(file.with_suffix(".json"), tmp_path / "first" / "parts")
    records, _ = performed("table2", resumed(first, most_images=12))
    assert sampled == [3, 4, 5]
    for key in ("fid", "fid_left_out"):
        assert [one[key] for one in records["papers"]] == [one[key] for one in whole["papers"]]


def test_the_fid_of_groups_of_features_is_that_of_all_images(prepared: Context) -> None:
    judge = Judge.of(prepared, ("fid",), References(table2.DATA, None, 8))
    assert judge.inception is not None
    features = image_features(image_set(random_images(9, SHAPE, seed=3), "x"), judge.inception, keep=True).features
    assert features is not None
    theirs = image_features(judge.references.load(), judge.inception).moments
    found = judge.fid_of(features.split(3))
    assert found["fid"] == pytest.approx(frechet_distance(features, theirs), rel=1e-9)
    left_out = [torch.cat([features[:i], features[i + 3 :]]) for i in (0, 3, 6)]
    assert found["fid_left_out"] == pytest.approx([frechet_distance(one, theirs) for one in left_out], rel=1e-9)


def test_fids_are_taken_at_these_numbers_of_images(prepared: Context) -> None:
    settings = replace(TINY, images=5_000, seeds=5)
    judge = Judge(("fid",), References(table2.DATA, None, 8), prepared.device)
    many = ManySeeds.of(Sampling(prepared, many_level_model(SHAPE), judge, settings))
    assert many.stops(50_000) == [5_000, 10_000, 20_000, 50_000]
    assert many.stops(34_000) == [5_000, 10_000, 20_000, 34_000]
    assert many.stops(3_000) == [3_000]
    for wrong in (1_000, 10_500):
        with pytest.raises(UsageError, match=rf"a multiple of the images a seed \(1,000\).* got {wrong:,}"):
            many.stops(wrong)


def test_the_tables_of_the_docs_take_a_run(prepared: Context, tmp_path: Path) -> None:
    """Those of the record as it is: rows of the run with its numbers, all others as before, a column for its images."""
    only = ("Heun", "Langevin", "Gibbs (paper)")
    records, _ = performed("table2", replace(prepared, only=only, most_images=6))
    docs = tmp_path / "tree" / "docs"
    (docs / "records").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "records" / "table2.json", docs / "records")
    page = docs / "cifar10.md"
    marks = "<!-- table: table2 main -->\n<!-- end of table -->\n<!-- table: table2 papers -->\n<!-- end of table -->\n"
    page.write_text(marks)

    def tables(*taken: str) -> list[str]:
        words = ["reproduce", "tables", "--out", str(docs.parent), *taken]
        assert CliRunner().invoke(cli.app, words).exit_code == 0
        return page.read_text().splitlines()

    before = tables()
    (head,) = (line for line in before if line.startswith("| FID of images"))
    after = tables("--from", f"table2={prepared.workspace.out}")
    others = [line for line in before if line.startswith(("| ancestral", "| DDIM", "| *paper", "| consistent"))]
    assert len(others) == 10
    assert [line for line in after if line in others] == others
    heads = [line for line in after if line.startswith("| FID of images")]
    assert heads == [head.replace("| FID of images |", "| FID of images | 4 | 6 |")]
    found = {one["row"]: one for one in records["papers"] if one["first images"] == 6}
    assert any(line.startswith("| Heun, 18 steps | ") and f"{found['Heun']['fid']:.2f} ±" in line for line in after)
    gap = found["Gibbs (paper)"]["fid"] - found["Langevin"]["fid"]
    assert any(line.startswith("| difference") and f"{gap:+.2f} ±" in line for line in after)
    cells = json.loads((docs / "records" / "table2.json").read_text())["samplers"]
    assert [one["levels or steps"] for one in cells if one["row"] == "Langevin"] == [56, 232, 2, 3]
    anew = tables("--from", f"table2={prepared.workspace.out}", "--anew")
    (left,) = (line for line in anew if line.startswith("| FID of images"))  # without a column that is empty now
    for row in ("Heun, 18 steps", "Langevin", "Gibbs"):  # each keeps nothing of the record's, unlike the guided row
        (line,) = (line for line in anew if line.startswith(f"| {row} | "))
        assert [bool(cell.strip()) for cell in line.split("|")[2:-1]] == [True, True, *[False] * (left.count("|") - 4)]
    (was,), (now,) = (
        [line for line in some if line.startswith("| Heun, 18 steps, guided |")] for some in (before, anew)
    )
    assert [cell for cell in now.split("|")[4:] if cell.strip()] == [
        cell for cell in was.split("|")[2:] if cell.strip()
    ]
