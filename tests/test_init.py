"""Training in several runs: each starts from the averaged weights of the one before, and the card
counts them all.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from nets import lively, random_images, save_pictures, tiny_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.models.conversion import export_model
from mmdgs.randomness import Streams, child_seed
from mmdgs.training import (
    ImageExamples,
    Recipe,
    Trainer,
    TrainingSettings,
    loss_of,
    metrics,
    read_recipe,
    train_model,
)
from mmdgs.training.examples import batch_order, read_sets

run = CliRunner().invoke
pytestmark = pytest.mark.usefixtures("small_fits")
FAST = TrainingSettings(
    steps=4, batch_size=8, learning_rate=1e-2, warmup=1, ema=0.9, checkpoint_every=2
)
STILL = dataclasses.replace(FAST, steps=1, learning_rate=1e-12)
"""A run that leaves the weights where they are."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """42 random pictures in two classes, 12x12."""
    names = [f"{('even', 'odd')[i % 2]}/{i:03}" for i in range(42)]
    images = random_images(42, (1, 12, 12))
    return save_pictures(tmp_path_factory.mktemp("pictures"), images, names)


def recipe_of(pictures: Path, init: Path | None = None, **changes: object) -> Recipe:
    keys = {"model": "unet-tiny", "network": {"multipliers": [1]}, "sigma": 0.5, "param": "score"}
    keys["training"] = FAST
    return Recipe(str(pictures), init=None if init is None else str(init), **{**keys, **changes})


@pytest.fixture
def first(pictures: Path, tmp_path: Path) -> Path:
    """The folder of a first run."""
    run_of(recipe_of(pictures), tmp_path / "first")
    return tmp_path / "first"


def run_of(recipe: Recipe, out: Path, **options: object) -> Model:
    return train_model(recipe, out, progress=None, **options)[0]


def assert_weights(model: Model, expected: dict[str, torch.Tensor], atol: float = 1e-9) -> None:
    torch.testing.assert_close(model.network.state_dict(), expected, rtol=0, atol=atol)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def first_loss(recipe: Recipe, model: Model, runs: int) -> float:
    """The loss of a model on the first batch of a run after so many others, by hand."""
    seed = child_seed(recipe.training.seed, f"run {runs}")
    streams, sets = Streams(seed, 8, purpose="noise"), read_sets(recipe, torch.device("cpu"))
    x = sets.train.take(next(batch_order(len(sets.train), 8, seed)), streams)
    return loss_of(model, weighting=recipe.weighting)(x, streams).mean().item()


# --- where it starts


def test_a_run_starts_from_the_averaged_weights_with_noise_of_its_own(
    first: Path, pictures: Path, tmp_path: Path
):
    recipe = recipe_of(pictures, first, training=STILL)
    model, earlier = run_of(recipe, tmp_path / "second"), mmdgs.load(first)
    assert_weights(model, earlier.network.state_dict())
    expected, same_noise = (first_loss(recipe, earlier, runs) for runs in (1, 0))
    assert losses(tmp_path / "second") == [pytest.approx(expected, rel=1e-5)]
    assert expected != pytest.approx(same_noise, rel=1e-3)
    # And a run after that one has noise of its own again.
    run_of(dataclasses.replace(recipe, init=str(tmp_path / "second")), tmp_path / "third")
    assert losses(tmp_path / "third") == [pytest.approx(first_loss(recipe, earlier, 2), rel=1e-5)]


def test_it_starts_from_shards_in_bf16(first: Path, pictures: Path, tmp_path: Path) -> None:
    export_model(first, tmp_path / "sent", shard_mb=0.01)
    assert len(list((tmp_path / "sent").glob("model-*.safetensors"))) > 1
    model = run_of(recipe_of(pictures, tmp_path / "sent", training=STILL), tmp_path / "second")
    weights = mmdgs.load(first).network.state_dict()
    assert_weights(model, {key: value.bfloat16().float() for key, value in weights.items()})
    assert model.config.trained_images == (4 + 1) * 8


def test_the_average_of_an_earlier_model_is_not_forgotten() -> None:
    def average(runs_before: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = tiny_model("score")
        start = model.network.first.weight.detach().clone()
        settings = TrainingSettings(steps=1, batch_size=8, learning_rate=1e-2, ema=0.99)
        examples = ImageExamples(random_images(20))
        Trainer(model.network, loss_of(model), examples, settings, runs_before=runs_before).run(
            None
        )
        return start, model.network.first.weight.detach()

    # Adam's first step is the learning rate in every direction: the average is 1 - ema of it away,
    # or with a start that is to be forgotten 9 / 10 of it.
    for runs_before, share in ((0, 0.9), (1, 0.01)):
        start, end = average(runs_before)
        moved = (end - start).abs()
        expected = torch.full_like(moved, share * 1e-2)
        torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-8)


def test_a_residual_unet_may_grow(pictures: Path, tmp_path: Path) -> None:
    """New blocks are the identity at first; the widths must agree."""
    keys = {"model": "unet-photo", "crop": 16, "param": "score", "sigma": 0.5, "training": STILL}
    save_pictures(tmp_path / "photos", random_images(8, (3, 20, 20)))
    small, large = ({"widths": [4, 8], "blocks": [1, 2]}, {"widths": [4, 8], "blocks": [3, 2]})
    moving = {"network": small, "training": dataclasses.replace(FAST, learning_rate=1e-2)}
    before = run_of(recipe_of(tmp_path / "photos", **{**keys, **moving}), tmp_path / "first")
    grown = recipe_of(tmp_path / "photos", tmp_path / "first", **{**keys, "network": large})
    after = run_of(grown, tmp_path / "second")
    x = random_images(2, (3, 16, 16)).float() / 255
    assert after.network.down[0][2].conv1.weight.abs().sum() > 0
    torch.testing.assert_close(after(x, after.level), before(x, before.level), rtol=0, atol=1e-6)
    wider = dataclasses.replace(grown, network={"widths": [8, 8], "blocks": [3, 2]})
    with pytest.raises(UsageError, match="widths"):
        run_of(wider, tmp_path / "third")


CLASSIFIER = {"param": "classes", "sigma": None, "model": "classifier"}
KINDS: dict[str, dict[str, object]] = {
    "energy": {"param": "energy"},
    "kl": {"param": "mean-std"},
    "many levels": {"param": "edm", "sigma": None, "levels": "geometric:5:10:0.1"},
    "classes": {**CLASSIFIER, "network": {"width": 8, "features": 8}},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_every_loss_goes_on(changes: dict[str, object], pictures: Path, tmp_path: Path) -> None:
    before = run_of(recipe_of(pictures, **changes), tmp_path / "first")
    recipe = recipe_of(pictures, tmp_path / "first", **{**changes, "training": STILL})
    assert_weights(run_of(recipe, tmp_path / "second"), before.network.state_dict())


def test_a_head_goes_on_with_its_scale(pictures: Path, tmp_path: Path) -> None:
    mmdgs.save(tiny_model(shape=(1, 12, 12)), tmp_path / "denoiser")
    keys = {"param": "variance-ratio", "sigma": None, "denoiser": str(tmp_path / "denoiser")}
    earlier = recipe_of(pictures, **keys, training=STILL)
    head = run_of(earlier, tmp_path / "first").config.head
    # Another seed measures another scale, which the weights know nothing of.
    still = dataclasses.replace(STILL, seed=5)
    recipe = recipe_of(pictures, tmp_path / "first", **{**keys, "training": still})
    fresh = run_of(dataclasses.replace(recipe, init=None), tmp_path / "fresh")
    assert fresh.config.head["scale"] != head["scale"]
    assert run_of(recipe, tmp_path / "second").config.head == head
    # So does a run that was cut and goes on, without the earlier one.
    shutil.rmtree(tmp_path / "first")
    more = dataclasses.replace(recipe, training=dataclasses.replace(still, steps=2))
    assert run_of(more, tmp_path / "second", resume=True).config.head == head
    # A denoiser that went on takes its head along.
    changed = tiny_model(shape=(1, 12, 12))
    lively(changed.network, seed=1)
    mmdgs.save(changed, tmp_path / "other")
    places = {"denoiser": str(tmp_path / "other"), "init": str(tmp_path / "second")}
    third = run_of(dataclasses.replace(recipe, **places), tmp_path / "third")
    assert third.config.head == head | {"denoiser": mmdgs.load(tmp_path / "other").digest}


# --- what the card says


def test_config_and_card_count_the_images_of_all_runs(
    first: Path, pictures: Path, tmp_path: Path
) -> None:
    assert mmdgs.load(first).config.trained_images == 4 * 8
    assert "| images seen in training | 32, in 1 run |" in (first / "README.md").read_text()
    longer = dataclasses.replace(FAST, steps=6, batch_size=5)
    run_of(recipe_of(pictures, first, training=longer), tmp_path / "second")
    config = run_of(recipe_of(pictures, tmp_path / "second"), tmp_path / "third").config
    assert mmdgs.load(tmp_path / "third").config == config
    assert config.trained_images == 4 * 8 + 6 * 5 + 4 * 8
    assert [(run["steps"], run["images"]) for run in config.runs] == [(4, 32), (6, 30), (4, 32)]
    assert "init" not in config.runs[0]
    init = f"{first.name} ({mmdgs.load(first).digest[:12]})"
    assert config.runs[1]["init"] == init
    assert f"--init {first.name} " in config.runs[1]["command"]
    card = (tmp_path / "third" / "README.md").read_text()
    assert "| images seen in training | 94, in 3 runs |" in card
    minutes, device = config.runs[1]["minutes"], config.runs[1]["device"]
    assert f"| 2 | 6 | 30 | {minutes:.6g} | {device} | {init} |" in card
    # And so does the best of the last run, which may be what goes on.
    best = mmdgs.load(tmp_path / "third" / "best").config
    assert (best.trained_images, len(best.runs)) == (94, 3)
    # They are for others to read: nothing says where on this machine files were.
    for text in (card, str(config), str(best)):
        assert str(tmp_path.parent) not in text


def test_a_model_that_says_nothing_of_its_training(pictures: Path, tmp_path: Path) -> None:
    options = {**tiny_model().config.options, "multipliers": [1]}
    mmdgs.save(tiny_model("score", shape=(1, 12, 12), options=options), tmp_path / "first")
    config = run_of(recipe_of(pictures, tmp_path / "first"), tmp_path / "second").config
    assert config.trained_images is None
    assert [run.get("images") for run in config.runs] == [None, 32]
    card = (tmp_path / "second" / "README.md").read_text()
    assert "| images seen in training | not known, in 2 runs |" in card
    again = run_of(recipe_of(pictures, tmp_path / "second"), tmp_path / "third")
    assert again.config.trained_images is None


# --- cut and resumed


def test_a_resumed_run_does_not_read_it_again(first: Path, pictures: Path, tmp_path: Path) -> None:
    recipe = recipe_of(pictures, first)
    whole = run_of(recipe, tmp_path / "whole")
    half = dataclasses.replace(recipe, training=dataclasses.replace(FAST, steps=2))
    run_of(half, tmp_path / "cut")
    shutil.rmtree(first)
    resumed = run_of(recipe, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert_weights(resumed, whole.network.state_dict(), atol=0)
    assert resumed.config.trained_images == whole.config.trained_images == 64
    assert resumed.config.runs[1]["init"] == whole.config.runs[1]["init"]
    other = dataclasses.replace(recipe, init=str(tmp_path / "whole"))
    with pytest.raises(UsageError, match="init was"):
        run_of(other, tmp_path / "cut", resume=True)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"multipliers": [1], "width": 16}}, "network.width is 8"),
        ({"param": "energy"}, "'score', and the recipe's 'energy'"),
        ({"levels": "edm:5", "sigma": None}, "network.conditional"),
        ({"model": "classifier", "network": {}, "param": "classes", "sigma": None}, "'unet'"),
    ],
)
def test_other_architectures_are_refused_by_their_first_difference(
    changes: dict[str, object], message: str, first: Path, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        run_of(recipe_of(pictures, first, **changes), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_colours_are_refused_by_the_tensor(first: Path, tmp_path: Path) -> None:
    save_pictures(tmp_path / "colours", random_images(30, (3, 12, 12)))
    message = r"first.weight is \(8, 1, 3, 3\), expected \(8, 3, 3, 3\)"
    with pytest.raises(UsageError, match=message):
        run_of(recipe_of(tmp_path / "colours", first), tmp_path / "second")


def test_noise_levels_dropout_and_sizes_may_change(
    first: Path, pictures: Path, tmp_path: Path
) -> None:
    network = {"multipliers": [1], "dropout": 0.3}
    recipe = recipe_of(pictures, first, sigma=0.3, size=8, network=network, training=STILL)
    model = run_of(recipe, tmp_path / "second")
    assert model.level == mmdgs.NoiseLevel(sigma=0.3)
    assert model.config.shape == (1, 8, 8)
    assert model.config.options["dropout"] == 0.3


# --- on the command line


def words(pictures: Path, out: Path, *more: str) -> list[str]:
    common = ["train", "--data", str(pictures), "--model", "unet-tiny", "--device", "cpu"]
    common += ["--set", "network.multipliers=[1]", "--param", "score", "--sigma", "0.5"]
    common += ["--batch-size", "8", "--steps", "4"]
    return [*common, "--out", str(out), *more]


def test_init_on_the_command_line(first: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "second"
    result = run(cli.app, words(pictures, out, "--init", str(first)))
    assert result.exit_code == 0, result.output
    assert f"cpu, from {first}" in " ".join(result.output.split())
    assert mmdgs.load(out).config.trained_images == 64
    assert read_recipe(out / "recipe.yaml").init == str(first)
    result = run(cli.app, words(pictures, tmp_path / "third", "--init", str(tmp_path / "nowhere")))
    assert result.exit_code == 2
    assert "there is no folder of this name here" in " ".join(result.output.split())
    assert not (tmp_path / "third").exists()
