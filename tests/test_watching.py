"""Watching samples while training: the run is the same without, and what it says is what one gets
by hand.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from fakes import fake_known, fake_script
from nets import random_images, save_pictures, tiny_model
from typer.testing import CliRunner

import mmdgs
from mmdgs.data import ImageSet, midpoints, to_uint8
from mmdgs.errors import UsageError
from mmdgs.metrics import inception_file
from mmdgs.metrics.features import image_features
from mmdgs.metrics.frechet import frechet_distance
from mmdgs.metrics.inception_file import load_inception
from mmdgs.metrics.neighbours import diversity
from mmdgs.moments import IsotropicMoments
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Streams, child_seed, uniforms
from mmdgs.samplers import Gibbs
from mmdgs.samplers.kernel import State
from mmdgs.schedules import geometric
from mmdgs.training import Recipe, TrainingSettings, metrics, read_recipe, train_model, watching
from mmdgs.training.watching import sample_watcher

run = CliRunner().invoke
pytestmark = pytest.mark.usefixtures("small_fits")
RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
PHOTO = next(path for path in RECIPES if path.stem == "photo")
MANY = {"sigma": None, "sigmas": tuple(level.sigma for level in geometric(5, 10, 0.1))}
IMAGES = ImageSet("some", "train", random_images(30))
SETTINGS = TrainingSettings(
    steps=6, batch_size=8, learning_rate=1e-2, ema=0.9, watch=6, watch_every=2
)


@pytest.fixture(autouse=True)
def _few_sweeps(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(watching, "SWEEPS", 3)
    monkeypatch.setattr(watching, "LEVELS", 3)
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("MMDGS_INCEPTION", raising=False)
    monkeypatch.setattr(inception_file, "_packaged", lambda: None)


@pytest.fixture
def inception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny network in the place of Inception."""
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    monkeypatch.setenv("MMDGS_INCEPTION", str(fake_script(tmp_path / "fake.pt")))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 42 random pictures in colours, 8x8: 39 to train on, 3 held out."""
    return save_pictures(tmp_path / "pictures", random_images(42, (3, 8, 8)))


def recipe_of(pictures: Path, **changes: object) -> Recipe:
    """A recipe at one level; `changes` are its own keys and those of the loop."""
    keys: dict[str, object] = {
        "model": "unet-tiny",
        "network": {"multipliers": [1], "dropout": 0.2},
        "sigma": 0.5,
        "param": "score",
    }
    loop = {name: changes.pop(name) for name in ("steps", "watch") if name in changes}
    return Recipe(
        str(pictures), **{**keys, "training": dataclasses.replace(SETTINGS, **loop), **changes}
    )


def lines(folder: Path, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in metrics(folder) if key in line}


# --- the run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"param": "energy"},
        {"param": "mean-std"},
        {"param": "edm", "sigma": None, "levels": "geometric:5:10:0.1"},
    ],
    ids=["score", "energy", "heads", "many levels"],
)
@pytest.mark.usefixtures("inception")
def test_a_watched_run_is_the_run(
    changes: dict[str, object], pictures: Path, tmp_path: Path
) -> None:
    model, trained = train_model(recipe_of(pictures, **changes), tmp_path / "a", progress=None)
    plain = recipe_of(pictures, watch=None, **changes)
    unwatched, other = train_model(plain, tmp_path / "b", progress=None)
    assert torch.equal(trained.losses, other.losses)
    assert trained.validations == other.validations
    weights = unwatched.network.state_dict()
    torch.testing.assert_close(model.network.state_dict(), weights, rtol=0, atol=0)
    # What it saw, in the metrics, as pictures and in the card.
    fid = lines(tmp_path / "a", "fid")
    assert list(fid) == [2, 4, 6]
    assert fid == {step: values["fid"] for step, values in trained.watches}
    seconds = sum(lines(tmp_path / "a", "watch_seconds").values())
    assert trained.watch_seconds == pytest.approx(seconds, abs=0.01)
    assert 0 < trained.watch_seconds < trained.seconds
    assert other.watch_seconds == 0
    names = sorted(path.name for path in (tmp_path / "a" / "watch").iterdir())
    assert names == ["0000002.png", "0000004.png", "0000006.png"]
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"| fid of 6 samples at step 6 | {fid[6]:.6g} |" in card


@pytest.mark.usefixtures("inception")
def test_the_best_is_the_lowest_fid_with_its_averaged_weights(
    pictures: Path, tmp_path: Path, monkeypatch
) -> None:
    values = iter([5.0, 3.0, 4.0])
    weights: list[torch.Tensor] = []
    measured = watching.SampleWatcher._measured

    def noted(self, samples):
        measures = measured(self, samples) | {"fid": next(values)}
        weights.append(self.model.network.first.weight.detach().clone())
        return measures

    monkeypatch.setattr(watching.SampleWatcher, "_measured", noted)
    last, _ = train_model(recipe_of(pictures), tmp_path / "a", progress=None)
    best = mmdgs.load(tmp_path / "a" / "best")
    assert torch.equal(best.network.first.weight, weights[1])
    assert not torch.equal(best.network.first.weight, last.network.first.weight)
    assert torch.equal(last.network.first.weight, weights[2])
    assert best.config.isotropic_variance > 0
    assert best.config.trained_images == 4 * 8
    assert "| fid of 6 samples | 3 |" in best.card
    assert "| step | 4 |" in best.card


@pytest.mark.usefixtures("inception")
def test_a_watched_run_goes_on(pictures: Path, tmp_path: Path) -> None:
    recipe = recipe_of(pictures)
    whole, _ = train_model(recipe, tmp_path / "whole", progress=None)
    train_model(recipe_of(pictures, steps=4), tmp_path / "cut", progress=None)
    cut, trained = train_model(recipe, tmp_path / "cut", resume=True, progress=None)
    assert torch.equal(whole.network.first.weight, cut.network.first.weight)
    assert [step for step, _ in trained.watches] == [2, 4, 6]
    fid = lines(tmp_path / "cut", "fid")
    assert fid == pytest.approx(lines(tmp_path / "whole", "fid"), rel=1e-6)
    state = json.loads((tmp_path / "cut" / "checkpoints" / "last" / "state.json").read_text())
    assert state["best_watch"] == min(fid.values())
    # As many samples as before, or the values would not compare.
    with pytest.raises(UsageError, match="watch was 6, now 7"):
        train_model(recipe_of(pictures, watch=7), tmp_path / "cut", resume=True, progress=None)


def test_without_an_inception_file_diversity_is_watched(
    pictures: Path, tmp_path: Path, caplog
) -> None:
    with caplog.at_level(logging.WARNING, "mmdgs"):
        train_model(recipe_of(pictures), tmp_path / "a", progress=None)
    said = [record.getMessage() for record in caplog.records if "watching" in record.getMessage()]
    assert len(said) == 1
    assert "no FID" in said[0]
    assert list(lines(tmp_path / "a", "diversity")) == [2, 4, 6]
    assert not lines(tmp_path / "a", "fid")
    # The best is then that of the validation loss.
    assert "validation loss" in mmdgs.load(tmp_path / "a" / "best").card


def test_samples_that_cannot_be_judged_do_not_end_the_run(
    pictures: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    def broken(self):
        raise mmdgs.NonFiniteError("state", [3])

    monkeypatch.setattr(watching.SampleWatcher, "_samples", broken)
    _, trained = train_model(recipe_of(pictures), tmp_path / "a", progress=None)
    assert len(trained.losses) == 6
    assert trained.watches == [(2, {}), (4, {}), (6, {})]
    assert "the samples at step 4 could not be judged: the state is not finite" in caplog.text


def test_what_cannot_be_watched(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="watch"):
        TrainingSettings(watch=1)
    points = recipe_of(pictures, model="mlp", network={"width": 8}, param="energy")
    points = dataclasses.replace(points, data="mog", limit=50)
    with pytest.raises(UsageError, match="'mog'"):
        train_model(points, tmp_path / "a", progress=None)
    assert not (tmp_path / "a").exists()
    options = {"width": 8, "features": 8, "dropout": 0.0}
    of_classes = {"sigma": None, "classes": ("a", "b"), "shape": (1, 12, 12)}
    classifier = tiny_model("classes", network="classifier", options=options, **of_classes)
    with pytest.raises(UsageError, match="'classes'"):
        sample_watcher(classifier, IMAGES, SETTINGS, tmp_path)


# --- what is measured


@pytest.mark.usefixtures("inception")
def test_the_numbers_are_those_of_the_samples(tmp_path: Path) -> None:
    watcher = sample_watcher(tiny_model("edm", **MANY), IMAGES, SETTINGS, tmp_path)
    samples = to_uint8(watcher._samples())
    measures = watcher.look(1)
    network = load_inception()
    ours, theirs = (
        image_features(images, network).moments for images in (ImageSet("a", "b", samples), IMAGES)
    )
    assert measures["fid"] == pytest.approx(frechet_distance(ours, theirs), rel=1e-9)
    of_data = diversity(IMAGES.images[::5])
    assert of_data.count == 6
    ratio = diversity(samples).distance / of_data.distance
    assert measures["diversity"] == pytest.approx(ratio, rel=1e-12)
    assert watcher.look(2) == measures  # the same noise at every look


def test_a_chain_at_one_level_by_hand() -> None:
    model = tiny_model("score")
    watcher = watching.SampleWatcher(model, IMAGES, SETTINGS, None, Path())
    x = midpoints(IMAGES.images)
    seed = child_seed(SETTINGS.seed, "watch")
    variance = IsotropicMoments.fit(
        model, x, model.level, generator=Streams(seed, len(x), purpose="fit")
    )
    assert variance.variances[model.level] > 0.01  # so that a draw is seen to differ from a mean
    start, streams = (Streams(seed, 6, purpose=purpose) for purpose in ("start", "steps"))
    state = State(uniforms((6, 1, 8, 8), torch.empty(0), start))
    for _ in range(2):
        state, _ = Gibbs(variance).step(state, model.level, CLEAN, generator=streams)
    x_t = mmdgs.add_noise(state.x, model.level, generator=streams)
    torch.testing.assert_close(watcher._samples(), model(x_t, model.level), rtol=0, atol=2e-5)


# --- the recipes that come with the source


@pytest.mark.parametrize("path", sorted({*RECIPES} - {PHOTO}), ids=lambda path: path.stem)
@pytest.mark.usefixtures("inception")
def test_a_recipe_trains(path: Path, pictures: Path, tmp_path: Path) -> None:
    whole = read_recipe(path)
    training = whole.training
    assert (training.batch_size, training.ema, training.precision) == (512, 0.9995, "bf16")
    assert whole.flips
    few = {"size": 8, "network.width": 32, "steps": 2, "batch_size": 4, "watch": 2}
    small = {"data": str(pictures), **few}
    recipe = read_recipe(path, small)
    model, trained = train_model(recipe, tmp_path / "a", progress=None)
    assert len(trained.losses) == 2
    assert "fid" in trained.watches[-1][1]
    assert model.levels == mmdgs.load(tmp_path / "a").levels


def test_the_recipe_of_photographs_trains(tmp_path: Path) -> None:
    """On crops of photographs of several sizes; the model then takes images of any size."""
    sizes = ((20, 16), (16, 33), (24, 24), (17, 40))
    images = (random_images(1, (3, *size))[0] for size in sizes)
    folder = save_pictures(tmp_path / "photographs", images)
    few = {"crop": 16, "network.widths": [32, 32], "network.blocks": [1, 1], "batch_size": 4}
    small = {"data": str(folder), "steps": 2, "minutes": None, "validate_every": 1, **few}
    recipe = read_recipe(PHOTO, small)
    assert recipe.turns
    assert recipe.training.precision == "bf16"
    model, trained = train_model(recipe, tmp_path / "a", progress=None)
    assert (len(trained.losses), len(trained.validations)) == (2, 2)
    assert model.shape == (3, None, None)
    x_t = torch.rand(1, 3, 19, 37, generator=torch.Generator().manual_seed(0))
    assert model(x_t, NoiseLevel(0.1)).shape == x_t.shape
    other, _ = train_model(recipe, tmp_path / "b", progress=None)
    assert other.digest == model.digest
