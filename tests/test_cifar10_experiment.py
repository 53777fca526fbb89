"""CIFAR-10 at one level as an experiment: chains whatever their batch, claims, and models that are
refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed, use_fake_inception
from nets import lively, tiny_model
from shared import cifar10_test_images, needs_cifar10_files
from toy_models import many_level_model

from experiments import Context, Workspace, cifar10, sampler_cells, single_level_chains
from experiments.cifar10 import MANY_LEVELS, TEST
from experiments.sampler_cells import References, SamplingSettings
from experiments.single_level_chains import (
    AUTHORS,
    DRAWS,
    FROM_NORMAL,
    GREY,
    MEANS,
    ROWS,
    SPECTRAL,
    SWITCHES,
    TEN_SIGNS,
    Chains,
)
from mmdgs import load, save
from mmdgs.data import midpoints
from mmdgs.errors import UsageError
from mmdgs.models import Model, ModelConfig
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import preset
from mmdgs.noise import CLEAN
from mmdgs.randomness import Streams, randn
from mmdgs.samplers import Gibbs, State

SHAPE = (3, 12, 12)
TINY = replace(
    cifar10.QUICK, images=6, steps=(1, 2, 3), block=4, long_chains=5, long_steps=(0, 1, 2),
    fit_images=4, batch_size=3, reference_limit=None, metrics=("fid", "diversity"), levels=3,
)  # fmt: skip


def classifier() -> Model:
    network, options = preset("classifier")
    config = ModelConfig(
        network, "classes", SHAPE, {**options, "width": 4, "features": 8}, classes=("cat", "dog")
    )
    model = Model.build(config)
    lively(model.network)
    model.network.eval()
    return model


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Tiny networks, a classifier, a folder in the place of CIFAR-10, a fake Inception."""
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    save(many_level_model(SHAPE), tmp_path / "many")
    save(classifier(), tmp_path / "classifier")
    monkeypatch.setattr(cifar10, "DATA", str(picture_folder(tmp_path / "images", shape=SHAPE)))
    use_fake_inception(tmp_path, monkeypatch)
    folders = {"model": "one", "many": "many", "classifier": "classifier"}
    names = {option: str(tmp_path / folder) for option, folder in folders.items()}
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), settings=TINY, **names)


def test_it_measures_and_draws_all_and_resumes_without_work(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, report = performed("cifar10", prepared)
    for kind in (DRAWS, MEANS):
        cells = records[kind]
        assert [(one["row"], one["Gibbs steps"]) for one in cells] == [
            (row, t) for row in ROWS for t in (1, 2, 3)
        ]
        assert all(one["fid"] > 0 for one in cells)
    long = [(one["row"], one["steps"]) for one in records["collapse"]]
    moving = [(row, steps) for row in (FROM_NORMAL, SPECTRAL) for steps in (1, 2)]
    assert long == [(TEST, 0), (MANY_LEVELS, 0), *moving]
    assert all(sum(one["class_shares"]) == pytest.approx(1) for one in records["collapse"])
    drawn = {
        f"cifar10_{name}{row}" for name in ("chains", "25_chains") for row in ("", "_spectral")
    }
    assert pictures_of(prepared) == drawn | {"cifar10_fid", "cifar10_collapse"}
    assert [len(section.claims) for section in report.sections] == [0, len(ROWS), 3]

    monkeypatch.setattr(single_level_chains, "generate", None)  # nothing is run again
    monkeypatch.setattr(sampler_cells, "generate", None)
    again = cifar10.run(resumed(prepared)).records
    assert [again[kind] for kind in (DRAWS, MEANS)] == [records[kind] for kind in (DRAWS, MEANS)]


def chains(tmp_path: Path, name: str, batch_size: int, block: int = 5) -> Chains:
    model = tiny_model("score", SHAPE, sigma=0.3)
    settings = SamplingSettings(batch_size=batch_size, precision="float32")
    context = Context(Workspace(tmp_path / name), torch.device("cpu"), quick=True)
    rows = ROWS | SWITCHES
    return Chains(context, model, References("none"), settings, probes=2, block=block, rows=rows)


@pytest.mark.parametrize(
    ("row", "probes"),
    [
        (FROM_NORMAL, {"probes": 2}),
        (TEN_SIGNS, {"probes": 10, "design": Rademacher()}),
        (AUTHORS, {"probes": 10, "design": Rademacher(), "floor": 0.0}),
    ],
)
def test_chains_are_gibbs_sweeps_whatever_their_batch(
    row: str, probes: dict[str, Any], tmp_path: Path
) -> None:
    found, cut = (chains(tmp_path, f"{size}", size).states(row, 5, (0, 1, 3)) for size in (5, 2))
    model = tiny_model("score", SHAPE, sigma=0.3)
    moments, level, means = DiagonalMoments(model, **probes), model.levels[0], []
    x0 = randn((5, *SHAPE), torch.empty(0), Streams(0, 5, purpose="start"))
    assert x0.std().item() == pytest.approx(1, abs=0.1)  # the paper's standard normal

    def noting(x_t, level, *, generator):  # type: ignore[no-untyped-def]
        means.append(model(x_t, level))
        return moments(x_t, level, generator=generator)

    state, streams = State(x0), Streams(0, 5, purpose="steps")
    for _ in range(3):
        state, _ = Gibbs(noting).step(state, level, CLEAN, generator=streams)
    for kind, last in ((DRAWS, state.x), (MEANS, means[-1])):
        assert (
            found[kind].int() - cut[kind].int()
        ).abs().max() <= 1  # another batch rounds differently
        expected = (last.detach().clamp(0, 1) * 255).round()
        assert (found[kind][2].float() - expected).abs().max() <= 1
    assert torch.equal(found[DRAWS][0], found[MEANS][0])  # the start
    assert not torch.equal(found[DRAWS][2], found[MEANS][2])


def test_what_images_are_like() -> None:
    x = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    x[1], x[2, :, :, 2:] = 51, 255
    seen = single_level_chains.likeness(x, torch.tensor([[0.0], [0.5]]).expand(2, 48))
    assert seen["brightness"] == pytest.approx([0.0, 0.2, 0.5])
    assert seen["black"] == [1.0, 0.0, 0.5]
    assert seen["contrast"] == pytest.approx([0.0, 0.0, 0.5], rel=0.02, abs=1e-6)
    assert seen["nearest"] == pytest.approx([0.0, 0.2, 0.5], abs=1e-3)


def test_each_change_from_the_authors_code_is_measured(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brightness of a start of mean 1/2 stays above that of N(0, I); clipping leaves some."""
    monkeypatch.setattr(single_level_chains, "DATA", cifar10.DATA)
    rows = (AUTHORS, GREY)
    tiny = replace(single_level_chains.QUICK, steps=(1, 2), rows=rows, data=None)
    records, report = performed("single-level-chains", replace(prepared, settings=tiny))
    cells = {(cell["row"], cell["Gibbs steps"]): cell for cell in records["switches"]}
    assert set(cells) == {(row, t) for row in rows for t in (1, 2)}
    assert min(cells[GREY, 1]["brightness"]) > max(cells[AUTHORS, 1]["brightness"])
    assert pictures_of(prepared) == {"single_level_switches"}
    assert len(report.sections[0].claims) == 1


def test_models_that_do_not_fit_are_refused(prepared: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one noise level"):
        cifar10.run(replace(prepared, model=str(tmp_path / "many")))
    unnamed, ships = replace(prepared, many=None), tiny_model("score", (3, 32, 32), sigma=0.3)
    beside = cifar10.many_model(unnamed, ships)
    assert beside is not None
    assert beside.source == "cifar10"
    assert cifar10.many_model(unnamed, tiny_model("score", SHAPE, sigma=0.3)) is None


@needs_cifar10_files
def test_the_classifier_knows_four_of_five_images_and_counts_classes_right() -> None:
    images, labels = cifar10_test_images(rows=100, columns=10)
    with torch.no_grad():
        found = load("cifar10-classifier").network(midpoints(images)).argmax(1)
    assert (found == labels).double().mean() > 0.79
    assert (torch.bincount(found, minlength=10) - 100).abs().max() < 30
