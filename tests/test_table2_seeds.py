"""FIDs of more seeds: stopped, gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed, picture_folder, resumed, use_fake_inception
from nets import random_images
from toy_models import stand_in_model

from experiments import Context, TimeIsUp, Workspace, sampler_cells, table2
from experiments.sampler_cells import Judge, References
from mmdgs.data import image_set
from mmdgs.metrics import frechet_distance
from mmdgs.metrics.features import image_features

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
SHAPE = (3, 8, 8)
TINY = replace(
    table2.QUICK, images=4, seeds=2, levels=2, langevin_steps=1, tuning_images=2, fit_images=4,
    reference_limit=None, metrics=("fid",), probes=1, heun=(2,), steps=(2,), rate_factors=(1.0,),
    most_images=10,
)  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A network with the name of the one that ships, a folder as its data, a fake Inception."""
    stand_in_model(tmp_path / "cifar10", SHAPE)
    images = str(picture_folder(tmp_path / "images"))
    use_fake_inception(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table2, "DATA", images)
    workspace = Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), settings=TINY)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The rows and seeds that are sampled, in their order."""
    generate, seeds = sampler_cells.generate, []

    def watched(*args: Any, seed: int, progress: str, **rest: Any) -> Any:
        seeds.append((progress.split(",")[0], seed))
        return generate(*args, seed=seed, progress=None, **rest)

    monkeypatch.setattr(sampler_cells, "generate", watched)
    return seeds


def heun(context: Context) -> list[dict[str, Any]]:
    records, _ = performed("table2-seeds", context)
    return [cell for cell in records["papers"] if cell["row"] == "Heun"]


def test_a_run_that_is_stopped_goes_on_and_no_seed_is_sampled_twice(
    prepared: Context, sampled: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: Context) -> None:  # in the midst of the seeds
        if sampled.count(("Heun", 2)):
            raise TimeIsUp

    with monkeypatch.context() as patch:
        patch.setattr(Context, "check_time", stopped)
        assert [cell["first images"] for cell in heun(prepared)] == [4]
    assert [cell["first images"] for cell in heun(resumed(prepared))] == [4, 8, 10]
    assert [seed for row, seed in sampled if row == "Heun"] == [0, 1, 2, 3, 4]


def test_the_fid_of_groups_of_features_is_that_of_all_images(prepared: Context) -> None:
    judge = Judge.of(prepared, ("fid",), References(table2.DATA, None, 8))
    assert judge.inception is not None
    images = image_set(random_images(9, SHAPE, seed=3), "x")
    features = image_features(images, judge.inception, keep=True).features
    theirs = image_features(judge.references.load(), judge.inception).moments
    assert features is not None
    values = judge.fid_of(features.split(3))
    assert values["fid"] == pytest.approx(frechet_distance(features, theirs), rel=1e-9)
    groups = [torch.cat([features[:i], features[i + 3 :]]) for i in (0, 3, 6)]
    expected = [frechet_distance(group, theirs) for group in groups]
    assert values["fid_left_out"] == pytest.approx(expected, rel=1e-9)
