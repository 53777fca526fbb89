"""The MNIST experiment end to end at a tiny size, on real digits: what it writes, that it resumes,
how it fails.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import unpaint

from experiments import EXPERIMENTS, Context, Outcome, Workspace, mnist_networks
from experiments.mnist import SCORES, TEST
from experiments.mnist_networks import ENERGY, LEARNED, QUANTISATION, SIGMAS, MnistSettings
from mmdgs.data import load_images
from mmdgs.errors import UsageError
from mmdgs.training import TrainingSettings, examples, run as training_run

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MNIST = EXPERIMENTS["mnist"]
FIGURES = ["losses", "std", "chains", "numbers", "sigmas"]

needs_digits = pytest.mark.skipif(
    not (DATA / "mnist").is_dir(),
    reason=f"the MNIST files are not in {DATA}; the experiment needs real digits",
)

TINY = MnistSettings(
    model="unet-tiny",
    network={"width": 4, "multipliers": [1, 1, 1]},
    training=TrainingSettings(
        steps=7, batch_size=4, learning_rate=4e-3, ema=0.5, checkpoint_every=5
    ),
    curves=TrainingSettings(steps=7, batch_size=4, learning_rate=1e-3),
    spike_window=5,
    chains=8,
    groups=2,
    steps=2,
    probes=1,
    map_probes=2,
)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make `--quick` tiny, and the test set and the validation on it small."""
    patch.setattr(mnist_networks, "QUICK", TINY)
    patch.setattr(mnist_networks, "load_images", partial(load_images, limit=300))
    patch.setattr(examples, "VALIDATION_EXAMPLES", 16)
    unpaint(patch)
    patch.setattr(training_run, "ISOTROPIC_EXAMPLES", {"cpu": 16})


@pytest.fixture
def tiny_mnist(monkeypatch):
    shrink(monkeypatch)


def context_in(folder: Path, **flags: bool) -> Context:
    workspace = Workspace(folder, **(flags or {"resume": True}))
    return Context(workspace, torch.device("cpu"), quick=True, data_dir=str(DATA))


def run(folder: Path, **flags: bool) -> Outcome:
    """Run the experiment in a folder, without writing its report."""
    context = context_in(folder, **flags)
    try:
        return MNIST.run(context)
    finally:
        context.workspace.close()


def forbid(monkeypatch, *places: str) -> None:
    """Make these functions fail if they are called."""

    def refuse(*args, **kwargs):
        raise AssertionError("this was to come from the folder")

    for place in places:
        monkeypatch.setattr(f"experiments.{place}", refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """One run, which the tests look at, or copy and go on from."""
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        MNIST.perform(context_in(folder))
    return folder, json.loads((folder / "records.json").read_text())


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


@needs_digits
def test_it_writes_records_figures_and_a_self_contained_report(finished):
    folder, records = finished
    page = (folder / "report.html").read_text()
    assert records["figures"] == [f"mnist_{name}.png" for name in FIGURES]
    for figure in records["figures"]:
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == len(FIGURES)
    assert 'src="http' not in page
    assert records["settings"]["training"]["steps"] == TINY.training.steps
    accuracy = records["yardstick"]["classifier_accuracy"]
    assert accuracy > 0.9
    assert f"{100 * accuracy:.2f}%" in page


@needs_digits
def test_its_records_hold_every_number(finished):
    records = finished[1]
    chains = {(one["row"], one["sigma"]): one for one in records["chains"]}
    rows = {(row, 0.5) for row in ("diagonal", "isotropic", "learned", TEST)}
    assert chains.keys() == rows | {("diagonal", sigma) for sigma in SIGMAS}
    for one in chains.values():
        assert one["group_size"] == 4
        assert all(len(one[measure.key]) == 2 for measure in SCORES if measure.key != "repaired")
        assert sum(one["class_shares"]) == pytest.approx(1)
    # The background of real digits has the noise of one grey level, and no sampler has less.
    assert chains[TEST, 0.5]["background"] == pytest.approx([QUANTISATION] * 2, rel=0.3)
    assert min(chains["isotropic", 0.5]["background"]) > 10 * QUANTISATION
    assert set(records["training"]) == {
        *(f"energy-{s:g}" for s in SIGMAS),
        LEARNED,
        "loss-dsm",
        "loss-kl",
    }
    assert records["training"]["loss-kl"]["recipe"]["learning_rate"] == TINY.curves.learning_rate


@needs_digits
@pytest.mark.usefixtures("tiny_mnist")
def test_resuming_reuses_every_part_and_a_lost_model_is_reported(finished, copied, monkeypatch):
    forbid(
        monkeypatch,
        "mnist_networks.train_model",
        "mnist_networks.features_and_classes",
        "mnist.generate",
        "mnist.moments_of",
    )
    found = json.loads(json.dumps(run(copied).records))
    assert found["chains"] == finished[1]["chains"]
    (copied / "models" / ENERGY / "config.json").unlink()
    with pytest.raises(UsageError, match=r"energy-0\.5 is gone"):
        run(copied)


@needs_digits
@pytest.mark.usefixtures("tiny_mnist")
def test_a_stopped_training_goes_on_from_its_checkpoint_and_overwrite_begins_anew(
    copied, monkeypatch
):
    before = _losses(copied)
    (copied / "parts" / f"train-{ENERGY}.json").unlink()
    (copied / "models" / ENERGY / "config.json").unlink()
    real, calls = mnist_networks.train_model, []

    def counted(recipe, folder, **options):
        calls.append((Path(folder).name, options["resume"], options["overwrite"]))
        return real(recipe, folder, **options)

    monkeypatch.setattr(mnist_networks, "train_model", counted)
    run(copied)
    assert calls == [(ENERGY, True, False)]
    assert _losses(copied) == before

    def first(recipe, folder, **options):
        calls.append((Path(folder).name, options["resume"], options["overwrite"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(mnist_networks, "train_model", first)
    with pytest.raises(KeyboardInterrupt):
        run(copied, overwrite=True)
    assert calls[1] == ("energy-0.3", False, True)
    assert {(resume, overwrite) for _, resume, overwrite in calls[1:]} == {(False, True)}


def _losses(folder: Path) -> list[float]:
    lines = (folder / "models" / ENERGY / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]
