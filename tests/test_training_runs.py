"""`mmdgs train` and `mmdgs sample` as a user meets them: recipes, folders, kills, full disks, several processes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nets import random_images, tiny_model
from PIL import Image
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import to_uint8
from mmdgs.errors import UsageError
from mmdgs.files import locked
from mmdgs.generation import Method
from mmdgs.randomness import Streams, child_seed, seeded
from mmdgs.schedules import geometric, variance_preserving_linear
from mmdgs.training import (
    ImageExamples,
    Recipe,
    RunFolder,
    Trainer,
    TrainingSettings,
    last_step,
    level_draw,
    loss_of,
    metrics,
    new_model,
    read_recipe,
    train_model,
)
from mmdgs.training.examples import batch_order, read_sets
from mmdgs.training.objective import jittered
from mmdgs.training.recipe import make_recipe, parse_override
from mmdgs.training.step import Stepper

run = CliRunner().invoke


def said(result: Any) -> str:
    """All a user saw, with line breaks folded."""
    return " ".join(result.output.split())


def write_pictures(folder: Path, count: int, size: int = 8, start: int = 0) -> None:
    folder.mkdir(parents=True)
    for i, image in enumerate(random_images(count, (1, size, size), seed=start)):
        Image.fromarray(image[0].numpy()).save(folder / f"{i:03}.png")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 42 random pictures, 8x8: 39 to train on, 3 held out."""
    folder = tmp_path_factory.mktemp("data") / "my pictures"
    write_pictures(folder, 42)
    return folder


@pytest.fixture
def recipe(pictures: Path) -> Recipe:
    settings = TrainingSettings(steps=4, batch_size=8, learning_rate=1e-3, warmup=2, decay=True, ema=0.9)
    network = {"multipliers": [1]}
    return Recipe(str(pictures), model="unet-tiny", network=network, param="score", sigma=0.5, training=settings)


@pytest.fixture(params=["one level", "many levels"])
def either(request: pytest.FixtureRequest, recipe: Recipe) -> Recipe:
    """A recipe for one level, and one for many."""
    return recipe if request.param == "one level" else at_many_levels(recipe)


def at_many_levels(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, sigma=None, levels="geometric:7:10:0.05", param="edm")


def words(recipe: Recipe, out: Path, *more: str) -> list[str]:
    """The words of the command line that trains a recipe."""
    return [*shlex.split(recipe.command(shlex.quote(str(out))))[1:], "--device", "cpu", *more]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def with_settings(recipe: Recipe, **changes: object) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **changes))


# --- recipes ----------------------------------------------------------------------------------------------------

YAML = "data: cifar10\nsigma: 0.3\nlearning_rate: 1e-4\nnetwork: {width: 16, attention: [1]}\nflips: false\nema: null\n"
TOML = 'data = "cifar10"\nsigma = 0.3\nlearning_rate = 1e-4\nflips = false\n[network]\nwidth = 16\nattention = [1]\n'


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.toml", TOML)])
def test_a_recipe_from_a_file_with_overrides(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    overrides = dict(map(parse_override, ["network.width=24", "sigma=1", "epochs=3", "ema=none"]))
    found = read_recipe(tmp_path / name, overrides)
    assert (found.data, found.sigma, found.flips, found.loss) == ("cifar10", 1.0, False, "dsm")
    assert found.network == {"width": 24, "attention": [1]}
    assert (found.training.learning_rate, found.training.epochs, found.training.ema) == (1e-4, 3.0, None)
    assert found.training.steps is None  # epochs say when it ends
    assert found.training.batch_size == Recipe().training.batch_size


RECIPES = {
    "unknown key": ("stepz: 3", "unknown key 'stepz' (did you mean 'steps'?)"),
    "unknown key, nothing like it": ("zzz: 3", "unknown key 'zzz'"),
    "a key that is no word": ("3: 4", "unknown key '3'"),
    "a key yaml takes for a truth value": ("on: 4", "unknown key 'True'"),
    "words for a number": ("steps: many", "steps must be int or none, got 'many'"),
    "half a step": ("steps: 2.5", "steps must be int or none, got 2.5"),
    "truth for a number": ("sigma: true", "sigma must be float or none, got True"),
    "a number for words": ("data: 3", "data must be str, got 3"),
    "words for truth": ("decay: maybe", "decay must be bool, got 'maybe'"),
    "a list for a table": ("network: [1]", "network must be dict, got [1]"),
    "none where there must be one": ("batch_size: null", "batch_size must be int, got None"),
    "no steps": ("steps: 0", "steps must be positive and finite, got 0"),
    "unknown model": ("model: unet-smal", "unknown model 'unet-smal' (did you mean 'unet-small'?)"),
    "unknown loss": ("loss: dsn", "unknown loss 'dsn' (did you mean 'dsm'?)"),
    "unknown parametrisation": ("param: scores", "unknown parametrisation 'scores' (did you mean 'score'?)"),
    "loss and parametrisation": ("{param: energy, loss: kl}", "'energy' is trained with the loss 'dsm', got 'kl'"),
    "loss of heads": ("{param: mean-std, loss: dsm}", "'mean-std' is trained with the loss 'kl', got 'dsm'"),
    "negative noise": ("sigma: -0.5", "sigma", "-0.5"),
    "no number": ("sigma: .nan", "sigma", "nan"),
    "no table": ("[1, 2]", "must be a table of keys and values, got list"),
    "empty": ("", "must be a table of keys and values, got NoneType"),
    "not yaml": ("a: [1", "is not YAML"),
    "unknown levels": ("levels: geometrical:3", "unknown noise levels 'geometrical:3'", "geometric:232:50:0.01"),
    "levels as a list": ("levels: [1, 2]", "levels must be str or none, got [1, 2]"),
    "levels and sigma": ("{levels: 'edm:18', sigma: 0.5}", "one noise level (sigma, alpha) or many (levels)", "0.5"),
    "levels and alpha": ("{levels: 'edm:18', alpha: 0.5}", "one noise level (sigma, alpha) or many (levels)", "0.5"),
    "unknown weighting": (
        "weighting: ncsnv",
        "unknown weighting 'ncsnv' (did you mean 'ncsnv2'?); choose one of score",
    ),
    "unknown draw": (
        "{levels: 'edm:18', level_draw: log}",
        "unknown level_draw 'log'; choose one of uniform, lognormal, mixed",
    ),
    "too much jitter": (
        "{levels: 'edm:18', level_jitter: 1.5}",
        "level_jitter must be at least 0 and below 1, got 1.5",
    ),
    "jitter of one level": ("{sigma: 1.0, level_jitter: 0.1}", "level_jitter is for the loss 'dsm' at many levels"),
    "a draw of one level": ("{sigma: 1.0, level_draw: lognormal}", "level_draw is for many levels"),
    "a weighting of heads": ("{param: mean-std, weighting: edm}", "weighting is for the loss 'dsm', and this is 'kl'"),
    "levels of a classifier": ("{param: classes, levels: 'edm:18'}", "a classifier has no noise levels"),
}


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES.keys())
def test_recipes_that_cannot_be(case, tmp_path: Path) -> None:
    text, *parts = case
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match="(?s)" + ".*".join(map(re.escape, parts))):
        read_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"steps = ", "is not TOML"),
        ("a.yaml", b"\xff\xfe\x00", "is not a text in UTF-8"),
        ("absent.yaml", None, "cannot read"),
    ],
)
def test_recipe_files_that_cannot_be_read(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_recipe(tmp_path / name)


@pytest.mark.parametrize("text", ["steps", "=3", "steps=[", "steps 3"])
def test_overrides_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_override(text)


COMMANDS = {
    "the default": Recipe(sigma=0.5),
    "a sigma of many digits": Recipe(sigma=0.123456789),
    "a folder with a blank and a quote": Recipe("my 'own' pictures", sigma=1e-4),
    "networks": Recipe(network={"width": 32, "multipliers": [1, 2], "attention": [], "dropout": 0.05}, sigma=0.3),
    "a classifier": Recipe(model="classifier", param="classes"),
    "many levels": Recipe(param="edm", levels="edm:18:80:0.002:7"),
    "many levels, all said": Recipe(param="noise", levels="cosine:50", weighting="noise", level_draw="lognormal"),
    "one level, weighted": Recipe(param="score", sigma=0.5, weighting="ncsnv2"),
    "heads at many levels": Recipe(param="mean-std", levels="linear"),
    "heads": Recipe(param="mean-std", sigma=0.3, alpha=0.9, flips=True, size=32, limit=100, unreadable="skip"),
    "the loop": Recipe(
        sigma=0.3,
        compile=False,
        training=TrainingSettings(
            steps=None, epochs=2.5, minutes=0.1, batch_size=7, learning_rate=1e-5, warmup=3, decay=False, clip=1.0,
            ema=None, precision="bf16", split=2, seed=11, checkpoint_every=None, validate_every=5,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_command_of_a_recipe_trains_that_recipe(recipe: Recipe, monkeypatch) -> None:
    found = []

    def note(recipe: Recipe, *_, **__):
        found.append(recipe)
        raise UsageError("enough")

    monkeypatch.setattr("mmdgs.training.run.train_model", note)
    monkeypatch.delenv("MMDGS_DATA", raising=False)
    result = run(cli.app, shlex.split(recipe.command("some/where"))[1:])
    assert result.exit_code == 2, result.output
    assert found == [recipe]


def test_a_table_of_a_recipe_is_that_recipe() -> None:
    for recipe in COMMANDS.values():
        assert make_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe


# --- from data to a model ---------------------------------------------------------------------------------------


def test_train_writes_a_model_and_sample_reads_it(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "a [bold] name"
    result = run(cli.app, words(recipe, out))
    assert result.exit_code == 0, result.output
    assert "4 steps, loss" in said(result)
    assert result.output.strip().splitlines()[-1] == f"model: {out}"
    for name in ("config.json", "model.safetensors", "README.md", "recipe.yaml", "best/config.json"):
        assert (out / name).is_file()
    assert recipe.published().command() in (out / "README.md").read_text()
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4]
    model = mmdgs.load(out)
    assert model.config.isotropic_variance > 0
    assert model.config.trained_on == Path(recipe.data).name
    # The recipe that was saved is the recipe: fed back, it gives the same model.
    assert read_recipe(out / "recipe.yaml") == recipe
    again = tmp_path / "again"
    result = run(cli.app, ["train", "--config", str(out / "recipe.yaml"), "--out", str(again), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert losses(again) == losses(out)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    picture, arrays = tmp_path / "x.png", tmp_path / "x.npz"
    common = ["sample", str(out), "--n", "5", "--steps", "2", "--device", "cpu", "--seed", "3"]
    result = run(cli.app, [*common, "--out", str(picture)])
    assert result.exit_code == 0, result.output
    with Image.open(picture) as image:
        assert image.size == (3 * (3 * 10 + 2), 3 * (2 * 10 + 2))  # three columns, two rows, three times as large
    assert run(cli.app, [*common, "--out", str(arrays)]).exit_code == 0
    found = np.load(arrays)["arr_0"]
    expected = mmdgs.generate(mmdgs.from_pretrained(str(out)), Method(steps=2), 5, seed=3, progress=None).x
    assert found.shape == (5, 8, 8, 1)
    np.testing.assert_array_equal(found, to_uint8(expected).permute(0, 2, 3, 1).numpy())
    floats = tmp_path / "floats.npz"
    assert run(cli.app, [*common, "--float", "--out", str(floats)]).exit_code == 0
    np.testing.assert_array_equal(np.load(floats)["x"], expected.numpy())
    result = run(cli.app, [*common, "--float", "--out", str(tmp_path / "y.png")])
    assert result.exit_code == 2
    assert "--float is for an --out that ends in .npz, got" in said(result)
    assert not (tmp_path / "y.png").exists()
    # A file that is there is not overwritten unasked.
    result = run(cli.app, [*common, "--out", str(arrays)])
    assert result.exit_code == 2
    assert "exists; use --overwrite" in said(result)
    isotropic = run(cli.app, [*common, "--out", str(arrays), "--overwrite", "--posterior", "isotropic"])
    assert isotropic.exit_code == 0, isotropic.output
    assert not np.array_equal(np.load(arrays)["arr_0"], found)


def test_points_are_trained_on_and_sampled_as_arrays(tmp_path: Path) -> None:
    common = ["--out", str(tmp_path / "m"), "--device", "cpu", "--steps", "3", "--sigma", "0.5"]
    more = ["--set", "network.width=8", "--set", "limit=200"]
    result = run(cli.app, ["train", "--data", "mog", "--model", "mlp", *common, *more])
    assert result.exit_code == 0, result.output
    sample = ["sample", str(tmp_path / "m"), "--n", "4", "--steps", "2", "--device", "cpu", "--out"]
    assert run(cli.app, [*sample, str(tmp_path / "x.npz")]).exit_code == 0
    points = np.load(tmp_path / "x.npz")["x"]
    assert points.shape == (4, 2)
    assert points.dtype == np.float32
    result = run(cli.app, [*sample, str(tmp_path / "x.png")])
    assert result.exit_code == 2
    assert "points of shape (2,), not images: use an --out ending in .npz" in said(result)


def test_a_classifier_learns_from_subfolders(tmp_path: Path) -> None:
    for i, name in enumerate(("bright", "dark")):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for j, image in enumerate(random_images(20, (1, 12, 12), seed=i)):
            Image.fromarray((image[0] // 2 + 127 * (name == "bright")).numpy()).save(folder / f"{j}.png")
    common = ["train", "--data", str(tmp_path / "data"), "--model", "classifier", "--param", "classes"]
    more = ["--set", "network.width=8", "--steps", "30", "--batch-size", "16", "--learning-rate", "0.01"]
    result = run(cli.app, [*common, *more, "--set", "warmup=0", "--out", str(tmp_path / "m"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    model = mmdgs.load(tmp_path / "m")
    assert model.config.classes == ("bright", "dark")
    means = torch.tensor([0.75, 0.25])[:, None, None, None].expand(2, 1, 12, 12)
    assert model.network(means).argmax(1).tolist() == [0, 1]
    found = losses(tmp_path / "m")
    assert found[-1] < 0.5 * found[0]
    result = run(cli.app, ["sample", str(tmp_path / "m"), "--out", str(tmp_path / "x.png"), "--device", "cpu"])
    assert result.exit_code == 2
    assert "classes" in said(result)


def test_many_levels_are_trained_at_and_saved(recipe: Recipe, tmp_path: Path) -> None:
    result = run(cli.app, words(at_many_levels(recipe), tmp_path))
    assert result.exit_code == 0, result.output
    model = mmdgs.load(tmp_path)
    assert model.levels == geometric(7, 10, 0.05)
    assert model.network.conditional
    assert model.config.isotropic_variance is None
    assert read_recipe(tmp_path / "recipe.yaml") == at_many_levels(recipe)
    for folder in (tmp_path, tmp_path / "best"):
        card = (folder / "README.md").read_text()
        assert "| noise levels | 7, sigma 10 to 0.05, alpha 1 |" in card
        assert "--levels geometric:7:10:0.05 --weighting edm" in card
        assert "model.level," not in card  # which would be refused
    x_t = torch.randn(2, 1, 8, 8, generator=seeded(0))
    for level in model.levels[::3]:
        assert torch.isfinite(model.posterior(probes=1)(x_t, level, generator=seeded(0)).mean).all()


def test_networks_take_the_level_where_there_are_many(recipe: Recipe) -> None:
    for levels, expected in ((None, False), ("linear:5", True)):
        one = dataclasses.replace(recipe, sigma=None if levels else 0.5, levels=levels, network={"width": 8})
        for name, shape in (("unet-tiny", (1, 8, 8)), ("mlp", (2,))):
            assert new_model(dataclasses.replace(one, model=name), shape).network.conditional is expected
    model = new_model(dataclasses.replace(one, network={"conditional": False}), (1, 8, 8))
    assert not model.network.conditional  # as it was asked for
    assert model.levels == variance_preserving_linear(5)
    with pytest.raises(UsageError, match="'classifier' takes no noise level"):
        new_model(dataclasses.replace(one, model="classifier", network={}), (1, 12, 12))


def test_what_goes_with_many_levels_unless_said() -> None:
    found = {param: Recipe(param=param, levels="edm:18") for param in ("edm", "noise", "mean-std")}
    assert [one.weighting for one in found.values()] == ["edm", "ncsnv2", None]
    assert {one.level_draw for one in found.values()} == {"uniform"}
    # A recipe of one level has none of these keys: a run that was begun before there were any can go on.
    assert (Recipe(sigma=0.5).weighting, Recipe(sigma=0.5).level_draw) == (None, None)


@pytest.mark.parametrize(
    ("weighting", "draw", "jitter"), [("ncsnv2", "uniform", None), ("edm", "lognormal", None), ("edm", "uniform", 0.3)]
)
def test_a_recipes_weighting_draw_and_jitter_are_those_of_its_loss(
    weighting: str, draw: str, jitter: float | None, recipe: Recipe, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(at_many_levels(recipe), weighting=weighting, level_draw=draw, level_jitter=jitter)
    recipe = with_settings(recipe, steps=1, learning_rate=1e-12, warmup=0, ema=None)
    train_model(recipe, tmp_path, progress=None)
    seed = child_seed(0, "run 0")
    model, streams = mmdgs.load(tmp_path), Streams(seed, 8, purpose="noise")
    sets = read_sets(recipe, torch.device("cpu"))
    x = sets.train.take(next(batch_order(len(sets.train), 8, seed)), streams)
    levels = level_draw(model.levels, draw)(x, streams)
    told = jittered(levels, 0.3, x, streams) if jitter else None
    weigh = mmdgs.losses.WEIGHTINGS[weighting]
    expected = mmdgs.losses.dsm(
        model.denoiser_of(model.network), x, levels, generator=streams, weighting=weigh, told=told
    )
    expected = expected.mean().item()
    assert losses(tmp_path) == [pytest.approx(expected, rel=1e-4)]


# --- misuse -----------------------------------------------------------------------------------------------------

MISUSE = {
    "no sigma": (["--param", "energy"], "'energy' needs sigma"),
    "loss and parametrisation": (["--sigma", "1", "--loss", "kl"], "'energy' is trained with the loss 'dsm'"),
    "unknown key": (["--sigma", "1", "--set", "stepz=3"], "the command line has an unknown key 'stepz' (did you mean"),
    "no key": (["--sigma", "1", "--set", "3"], "--set takes key=value"),
    "unknown option of the network": (["--sigma", "1", "--set", "network.depht=3"], "has no option 'depht'"),
    "unknown data": (["--sigma", "1", "--data", "mnits"], "(did you mean 'mnist'?)"),
    "a network for points": (["--sigma", "1", "--model", "mlp"], "does not fit data of shape (1, 8, 8)"),
    "a network for images": (["--sigma", "1", "--data", "mog"], "does not fit data of shape (2,)"),
    "no labels": (["--param", "classes", "--model", "classifier"], "has no labels to train a classifier on"),
    "no end": (["--sigma", "1", "--set", "steps=none"], "say when training ends"),
    "a device": (["--sigma", "1", "--device", "abacus"], "device 'abacus' cannot be used here"),
    "too many parts": (["--sigma", "1", "--set", "split=99"], "split must not be more than the 39 examples"),
    "both kinds of levels": (["--sigma", "1", "--levels", "edm:18"], "one noise level (sigma, alpha) or many (levels)"),
    "levels that cannot be": (["--levels", "geometric:9:1:2"], "first must be larger than last, got 1.0 and 2.0"),
    "both": (["--sigma", "1", "--resume", "--overwrite"], "choose one of --resume (go on) and --overwrite"),
}


@pytest.mark.parametrize("case", MISUSE.values(), ids=MISUSE.keys())
def test_misuse_of_train_is_status_2_and_leaves_nothing_in_the_way(case, pictures: Path, tmp_path: Path) -> None:
    more, message = case
    out = tmp_path / "out"
    result = run(cli.app, ["train", "--data", str(pictures), "--model", "unet-tiny", "--out", str(out), *more])
    assert result.exit_code == 2, result.output
    assert message in said(result)
    assert "Traceback" not in result.output
    # Nothing is left behind: the corrected command must not be told that the folder is not empty.
    assert not out.exists()


def test_a_classifier_for_images_too_small(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_pictures(tmp_path / "data" / name, 4)
    common = ["train", "--data", str(tmp_path / "data"), "--model", "classifier", "--param", "classes"]
    result = run(cli.app, [*common, "--steps", "1", "--out", str(tmp_path / "m"), "--device", "cpu"])
    assert result.exit_code != 0
    assert "images of at least 12x12 pixels, got 8x8" in said(result)


def test_an_output_that_is_a_file_or_cannot_be_made(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    result = run(cli.app, words(recipe, tmp_path / "out"))
    assert result.exit_code == 2
    assert "is a file; give a folder" in said(result)
    result = run(cli.app, words(recipe, tmp_path / "out" / "below"))
    assert result.exit_code == 2
    assert "cannot write in the output folder" in said(result)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_that_is_not_empty(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = run(cli.app, words(recipe, tmp_path))
    assert result.exit_code == 2
    assert "is not empty; use --resume to go on, --overwrite to start anew, or another folder" in said(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt"]
    first = run(cli.app, words(recipe, tmp_path, "--overwrite"))
    assert first.exit_code == 0, first.output
    other = with_settings(recipe, seed=5, steps=3)
    assert run(cli.app, words(other, tmp_path, "--overwrite")).exit_code == 0
    assert len(losses(tmp_path)) == 3
    train_model(other, tmp_path / "fresh", progress=None)
    assert losses(tmp_path / "fresh") == losses(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_runs_into_one_folder(recipe: Recipe, tmp_path: Path) -> None:
    with locked(tmp_path):
        for flag in ([], ["--overwrite"], ["--resume"]):
            result = run(cli.app, words(recipe, tmp_path, *flag))
            assert result.exit_code == 2
            assert "another run is writing into" in said(result)
    assert run(cli.app, words(recipe, tmp_path)).exit_code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "x.jpg"], "--out must end in .png or .npz, or be a folder, got x.jpg"),
        (["--out", "no/x.png"], "there is no folder no to write x.png into"),
        (
            ["--posterior", "exact"],
            "no covariance 'exact'; choose one of diagonal, rademacher, lattice",
        ),
        (["--posterior", "learned"], "'energy' has no learned posterior"),
        (["--posterior", "isotropic"], "no isotropic variances are kept for model that cover"),
        (["--n", "0"], "--n"),
        (["--steps", "0"], "--steps"),
        (["--probes", "0"], "--probes"),
    ],
)
def test_misuse_of_sample(more: list[str], message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    mmdgs.save(tiny_model(), "model")
    result = run(cli.app, ["sample", "model", "--device", "cpu", *more])
    assert result.exit_code == 2
    assert message in said(result)
    assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_sampling_what_is_no_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name, message in (("file", "no checkpoint"), ("absent", "no folder of this name"), ("empty", "holds no model")):
        result = run(cli.app, ["sample", name, "--device", "cpu"])
        assert result.exit_code == 2
        assert message in said(result)
    mmdgs.save(tiny_model("score"), "score")
    result = run(cli.app, ["sample", "score", "--device", "cpu", "--posterior", "learned"])
    assert result.exit_code == 2
    assert "'score' has no learned posterior" in said(result)


# --- going on ---------------------------------------------------------------------------------------------------


def test_a_run_does_not_go_on_with_other_images(recipe: Recipe, tmp_path: Path) -> None:
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    shutil.copytree(recipe.data, pictures)
    own = dataclasses.replace(recipe, data=str(pictures))
    assert run(cli.app, words(with_settings(own, steps=2), out)).exit_code == 0
    checkpoint = (out / "checkpoints" / "last" / "state.json").read_bytes()
    file = sorted(pictures.rglob("*.png"))[5]
    content = file.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.rotate(90).save(file)
    result = run(cli.app, words(own, out, "--resume"))
    assert result.exit_code == 2
    assert "was started with other settings (images was" in said(result)
    assert (out / "checkpoints" / "last" / "state.json").read_bytes() == checkpoint
    file.write_bytes(content)
    assert run(cli.app, words(own, out, "--resume")).exit_code == 0


def test_interrupted_by_control_c_and_resumed(either: Recipe, tmp_path: Path, monkeypatch) -> None:
    recipe = with_settings(either, steps=6, checkpoint_every=2)
    whole, out = tmp_path / "whole", tmp_path / "out"
    train_model(recipe, whole, progress=None)
    step = Stepper.step

    def interrupted(self: Stepper, indices: torch.Tensor, number: int, rate: float) -> torch.Tensor:
        if number == 5:
            raise KeyboardInterrupt
        return step(self, indices, number, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", interrupted)
        result = run(cli.app, words(recipe, out))
    assert result.exit_code == 130
    assert "is of step 4. To go on from it: the same command with --resume" in said(result)
    assert "Traceback" not in result.output
    assert not (out / "config.json").exists()
    result = run(cli.app, words(recipe, out, "--resume"))
    assert result.exit_code == 0, result.output
    assert "resuming after step 4" in said(result)
    assert losses(out) == losses(whole)
    for folder in ("", "best"):
        assert (out / folder / "model.safetensors").read_bytes() == (whole / folder / "model.safetensors").read_bytes()
    # A run that is done has nothing more to do; with more steps it goes on.
    assert run(cli.app, words(recipe, out, "--resume")).exit_code == 0
    assert losses(out) == losses(whole)
    longer = with_settings(recipe, steps=7)
    assert run(cli.app, words(longer, out, "--resume")).exit_code == 0
    assert len(losses(out)) == 7


def test_resuming_with_other_settings_names_the_key(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    other = with_settings(dataclasses.replace(recipe, sigma=0.7), learning_rate=0.5)
    result = run(cli.app, words(other, tmp_path, "--resume"))
    assert result.exit_code == 2
    assert "started with other settings (learning_rate was 0.001, now 0.5, sigma was 0.5, now 0.7)" in said(result)
    assert read_recipe(tmp_path / "recipe.yaml") == recipe


def test_resuming_where_nothing_was_begun(recipe: Recipe, tmp_path: Path) -> None:
    result = run(cli.app, words(recipe, tmp_path / "new", "--resume"))
    assert result.exit_code == 0, result.output
    assert "new: starting at step 1" in said(result)
    assert len(losses(tmp_path / "new")) == 4


def test_resuming_without_a_checkpoint_overwrites_nothing(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run(cli.app, words(with_settings(recipe, steps=6), tmp_path, "--resume"))
    assert result.exit_code == 2
    assert "there is no checkpoint in" in said(result)
    assert "use --overwrite to start anew" in said(result)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def at_points(out: Path, steps: int) -> list[str]:
    """The command that trains a perceptron on points, its checkpoints far apart."""
    sizes = ["--set", "network.width=8", "--set", "network.depth=1", "--set", "decay=false", "--device", "cpu"]
    common = ["train", "--data", "mog", "--model", "mlp", "--sigma", "0.5", "--out", str(out), *sizes]
    return [*common, "--set", "checkpoint_every=1000000", "--set", "validate_every=1000000", "--steps", str(steps)]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_from_it(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mmdgs", *at_points(out, 100_000_000)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert wait_until(lambda: (out / "metrics.jsonl").is_file() and len(losses(out)) > 0, process)
        process.send_signal(number)
        errors = " ".join(process.communicate(timeout=100)[1].split())
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    step = last_step(out)
    assert f"is of step {step:,}. To go on from it: the same command with --resume" in errors
    assert len(losses(out)) == step, "every step that was taken is in the checkpoint and in the metrics"
    result = run(cli.app, [*at_points(out, step + 20), "--resume"])
    assert result.exit_code == 0, result.output
    assert f"resuming after step {step:,}" in said(result)
    assert run(cli.app, at_points(tmp_path / "whole", step + 20)).exit_code == 0
    assert losses(out) == losses(tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 100) -> bool:
    """Whether a condition comes true while a process runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_checkpoint_that_is_damaged(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    damaged = tmp_path / "checkpoints" / "last" / "optimiser.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run(cli.app, words(with_settings(recipe, steps=6), tmp_path, "--resume"))
    assert result.exit_code == 2
    assert "optimiser.safetensors is not a whole safetensors file" in said(result)


def test_a_loss_that_blows_up_is_status_1(recipe: Recipe, tmp_path: Path) -> None:
    result = run(cli.app, words(with_settings(recipe, learning_rate=1e30, warmup=0, steps=9), tmp_path))
    assert result.exit_code == 1
    assert "is not finite at step" in said(result)
    assert "smaller learning rate" in said(result)


@pytest.fixture
def room():
    """Let the operating system refuse files larger than some bytes, as a full disk would; undone afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # Python's way: a write fails in place of a signal
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_checkpoint_before(recipe: Recipe, tmp_path: Path, room) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    recipe = with_settings(recipe, decay=False)  # with it the number of steps would change the path
    train_model(with_settings(recipe, steps=6), whole, progress=None)
    train_model(with_settings(recipe, steps=3), out, progress=None)
    before = out / "checkpoints" / "last"
    kept = {path.name: path.read_bytes() for path in before.iterdir()}
    size = (before / "network.safetensors").stat().st_size
    assert (before / "optimiser.safetensors").stat().st_size > 1.5 * size
    room(int(1.2 * size))  # the model fits, Adam's state does not
    result = run(cli.app, words(with_settings(recipe, steps=6, checkpoint_every=2), out, "--resume"))
    room(resource.RLIM_INFINITY)
    assert result.exit_code == 1, result.output
    assert "the checkpoint at step 4 could not be written into" in said(result)
    assert "File too large" in said(result)
    assert "use --resume" in said(result)
    assert {path.name: path.read_bytes() for path in before.iterdir()} == kept
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["last"]
    assert sorted(path.name for path in out.rglob(".*")) == [".lock"]
    result = run(cli.app, words(with_settings(recipe, steps=6, checkpoint_every=2), out, "--resume"))
    assert result.exit_code == 0, result.output
    assert losses(out) == losses(whole)


KILLED = """
import os, signal, sys
from mmdgs import cli
from mmdgs.training import checkpoint

write, saves = checkpoint.write_atomically, 0

def kill_in_the_third_checkpoint(path, content):
    global saves
    saves += path.name == "state.json"
    if saves == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)

checkpoint.write_atomically = kill_in_the_third_checkpoint
cli.app(sys.argv[1:])
"""


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_nothing_had_happened(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, param="score", network={"multipliers": [1], "dropout": 0.1})
    recipe = with_settings(recipe, steps=8, checkpoint_every=2)
    whole, out = tmp_path / "whole", tmp_path / "out"
    train_model(recipe, whole, progress=None)
    killed = subprocess.run([sys.executable, "-c", KILLED, *words(recipe, out)], capture_output=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(losses(out)) == 6
    assert not (out / "config.json").exists()
    half = [path for path in (out / "checkpoints").iterdir() if path.name != "last"]
    assert [path.name for path in half[0].iterdir()].count("state.json") == 0
    result = run(cli.app, words(recipe, out, "--resume"))
    assert result.exit_code == 0, result.output
    lines = [line for line in metrics(out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert losses(out) == pytest.approx(losses(whole), rel=1e-6)
    assert sorted(path.name for path in out.rglob(".*")) == [".lock"]
    one, two = (mmdgs.load(folder).network.state_dict() for folder in (whole, out))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-6)


def test_what_a_kill_left_half_written_is_cleared_away(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    (tmp_path / "checkpoints" / ".last.abc").mkdir()
    (tmp_path / "checkpoints" / ".last.abc" / "network.safetensors").write_bytes(b"half")
    train_model(with_settings(recipe, steps=5), tmp_path, resume=True, progress=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last"]


def test_a_run_begun_anew_removes_the_old_model(recipe: Recipe, tmp_path: Path) -> None:
    # Else a kill would leave the old weights in the folder, to pass for those of the new recipe.
    train_model(recipe, tmp_path, progress=None)
    folder = RunFolder(tmp_path, {})
    folder.clear(everything=False)
    assert (tmp_path / "config.json").exists()
    folder.clear(everything=True)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "recipe.yaml"}


# --- several processes ------------------------------------------------------------------------------------------


IN_TWO = """
import sys
from accelerate import Accelerator, DistributedDataParallelKwargs
from mmdgs import cli
from mmdgs.training import read_recipe, train_model

folder, *command = sys.argv[1:]
both = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
for name, out, resume in (("many", "many", False), ("second", "second", False), ("longer", "second", True)):
    train_model(read_recipe(f"{folder}/{name}.yaml"), f"{folder}/two/{out}", resume=resume, accelerator=both)
cli.app(command)
"""
"""All that two processes are tested with, since starting them takes most of the time."""


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, network={"multipliers": [1], "dropout": 0.1}, param="score")
    recipe = with_settings(recipe, split=2, clip=10.0, checkpoint_every=3)
    many = at_many_levels(recipe)
    train_model(recipe, tmp_path / "one" / "only", progress=None)
    second = dataclasses.replace(many, init=str(tmp_path / "one" / "many"))
    second = with_settings(second, watch=4, watch_every=2, steps=2, decay=False)
    recipes = {"many": many, "second": second, "longer": with_settings(second, steps=4)}
    for name, one in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(one.to_dict()))
        train_model(one, tmp_path / "one" / name, progress=None)
    (tmp_path / "two").mkdir()
    (tmp_path / "in_two.py").write_text(IN_TWO)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = [str(tmp_path / "in_two.py"), str(tmp_path), *words(recipe, tmp_path / "two" / "only")]
    found = subprocess.run([*launch, *more], capture_output=True, timeout=200)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout.decode().count("model:") == 1
    for name, whole in (("only", "only"), ("many", "many"), ("second", "longer")):
        one, two = tmp_path / "one" / whole, tmp_path / "two" / name
        assert [line["step"] for line in metrics(two) if "loss" in line] == [1, 2, 3, 4]  # each once
        assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert [line["step"] for line in metrics(tmp_path / "two" / "second") if "diversity" in line] == [2, 4]
    assert mmdgs.load(tmp_path / "two" / "second").config.trained_images == (4 + 4) * 8
    one, two = (mmdgs.load(tmp_path / name / "only").config.isotropic_variance for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


def test_a_batch_that_processes_cannot_share() -> None:
    model = tiny_model()
    three = SimpleNamespace(num_processes=3, process_index=0, is_main_process=True)
    with pytest.raises(UsageError, match="batch_size 8 cannot be shared evenly by 3 processes"):
        Trainer(
            model.network,
            loss_of(model),
            ImageExamples(random_images(20)),
            TrainingSettings(steps=1, batch_size=8),
            accelerator=three,  # type: ignore[arg-type]
        )


# --- what a recipe says of the data -----------------------------------------------------------------------------


def test_mirrored_images_where_the_recipe_says_so(recipe: Recipe) -> None:
    for flips, expected in ((None, False), (False, False), (True, True)):
        sets = read_sets(dataclasses.replace(recipe, flips=flips), torch.device("cpu"))
        assert sets.train.flips is expected
        assert sets.held_out.flips is False  # the held-out images are as they are


def test_yaml_of_a_run_is_for_people(recipe: Recipe, tmp_path: Path) -> None:
    train_model(with_settings(recipe, steps=1), tmp_path, progress=None)
    table = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert table["sigma"] == 0.5
    assert table["steps"] == 1
    assert list(table)[:2] == ["data", "data_dir"]
