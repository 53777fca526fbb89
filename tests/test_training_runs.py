"""`mmdgs train` and `mmdgs sample` as a user meets them: recipes, folders, kills, full disks,
several processes.
"""

from __future__ import annotations

import dataclasses
import io
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
from nets import random_images, save_pictures, tiny_model
from PIL import Image
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import to_uint8
from mmdgs.errors import UsageError
from mmdgs.randomness import Streams, child_seed, seeded
from mmdgs.sampling import SamplerSettings
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
from mmdgs.training.recipe import parse_override
from mmdgs.training.step import Stepper

run = CliRunner().invoke


def said(result: Any) -> str:
    """All a user saw, with line breaks folded."""
    return " ".join(result.output.split())


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 42 random pictures, 8x8: 39 to train on, 3 held out."""
    return save_pictures(tmp_path_factory.mktemp("data") / "my pictures", random_images(42))


@pytest.fixture
def recipe(pictures: Path) -> Recipe:
    settings = TrainingSettings(
        steps=4, batch_size=8, learning_rate=1e-3, warmup=2, decay=True, ema=0.9
    )
    common = {"model": "unet-tiny", "network": {"multipliers": [1]}, "training": settings}
    return Recipe(str(pictures), param="score", sigma=0.5, **common)


@pytest.fixture(params=["one level", "many levels"])
def either(request: pytest.FixtureRequest, recipe: Recipe) -> Recipe:
    """A recipe for one level, and one for many."""
    return recipe if request.param == "one level" else at_many_levels(recipe)


def at_many_levels(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, sigma=None, levels="geometric:7:10:0.05", param="edm")


def words(recipe: Recipe, out: Path, *more: str) -> list[str]:
    """The words of the command line that trains a recipe."""
    return [*shlex.split(recipe.command(shlex.quote(str(out))))[1:], "--device", "cpu", *more]


def succeeds(words: list[str]) -> str:
    """What a command says that must succeed."""
    result = run(cli.app, words)
    assert result.exit_code == 0, result.output
    return said(result)


def refused(words: list[str], status: int = 2) -> str:
    """What a command says that must end with this status."""
    result = run(cli.app, words)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return said(result)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def with_settings(recipe: Recipe, **changes: object) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **changes))


# --- recipes

YAML = """data: cifar10
sigma: 0.3
learning_rate: 1e-4
network: {width: 16, attention: [1]}
flips: false
ema: null
"""
TOML = """data = "cifar10"
sigma = 0.3
learning_rate = 1e-4
flips = false
[network]
width = 16
attention = [1]
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.toml", TOML)])
def test_a_recipe_from_a_file_with_overrides(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    overrides = dict(map(parse_override, ["network.width=24", "sigma=1", "epochs=3", "ema=none"]))
    recipe = read_recipe(tmp_path / name, overrides)
    assert (recipe.data, recipe.sigma, recipe.flips, recipe.loss) == ("cifar10", 1.0, False, "dsm")
    assert recipe.network == {"width": 24, "attention": [1]}
    training = recipe.training
    assert (training.learning_rate, training.epochs, training.ema) == (1e-4, 3.0, None)
    assert training.steps is None  # epochs say when it ends
    assert training.batch_size == Recipe().training.batch_size


RECIPES = {
    "unknown key": ("stepz: 3", "stepz", "'steps'?"),
    "a key that is no word": ("3: 4", "'3'"),
    "words for a number": ("steps: many", "steps", "'many'"),
    "none where there must be one": ("batch_size: null", "batch_size", "None"),
    "no steps": ("steps: 0", "steps", "0"),
    "unknown model": ("model: unet-smal", "'unet-smal'", "'unet-small'?"),
    "loss and parametrisation": ("{param: energy, loss: kl}", "'energy'", "'dsm'", "'kl'"),
    "negative noise": ("sigma: -0.5", "sigma", "-0.5"),
    "no table": ("[1, 2]", "table", "list"),
    "empty": ("", "table", "NoneType"),
    "not yaml": ("a: [1", "YAML"),
    "unknown levels": ("levels: geometrical:3", "'geometrical:3'", "geometric:232:50:0.01"),
    "levels and sigma": ("{levels: 'edm:18', sigma: 0.5}", "sigma", "levels", "0.5"),
    "unknown draw": ("{levels: 'edm:18', level_draw: log}", "level_draw 'log'", "lognormal"),
    "a draw about no level": ("{levels: 'edm:18', level_draw: 'mixed:-1'}", "MEDIAN", "mixed:-1"),
    "uniform about a level": ("{levels: 'edm:18', level_draw: 'uniform:1'}", "MEDIAN", "uniform:1"),
    "too much jitter": ("{levels: 'edm:18', level_jitter: 1.5}", "level_jitter", "1.5"),
    "smaller of whole images": ("{smaller: 2}", "smaller is a count, for crops", "got 2"),
    "a draw of one level": ("{sigma: 1.0, level_draw: lognormal}", "level_draw", "many levels"),
    "levels of a classifier": ("{param: classes, levels: 'edm:18'}", "classifier", "levels"),
    "not toml": ("steps = ", "TOML"),
    "no text": (b"\xff\xfe\x00", "UTF-8"),
    "no file": (None, "cannot read"),
}


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES.keys())
def test_recipes_that_cannot_be(case, tmp_path: Path) -> None:
    text, *parts = case
    path = tmp_path / ("a.toml" if parts == ["TOML"] else "a.yaml")
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match="(?s)" + ".*".join(map(re.escape, parts))):
        read_recipe(path)


COMMANDS = {
    "the default": Recipe(sigma=0.5),
    "a sigma of many digits": Recipe(sigma=0.123456789),
    "a folder with a blank and a quote": Recipe("my 'own' pictures", sigma=1e-4),
    "networks": Recipe(
        network={"width": 32, "multipliers": [1, 2], "attention": [], "dropout": 0.05}, sigma=0.3
    ),
    "a classifier": Recipe(model="classifier", param="classes"),
    "many levels": Recipe(param="edm", levels="edm:18:80:0.002:7"),
    "many levels, all said": Recipe(
        param="noise", levels="cosine:50", weighting="noise", level_draw="lognormal"
    ),
    "one level, weighted": Recipe(param="score", sigma=0.5, weighting="ncsnv2"),
    "heads at many levels": Recipe(param="mean-std", levels="linear"),
    "heads": Recipe(
        param="mean-std", sigma=0.3, alpha=0.9, flips=True, size=32, limit=100, unreadable="skip"
    ),
    "the loop": Recipe(
        sigma=0.3,
        compile=False,
        training=TrainingSettings(
            steps=None, epochs=2.5, minutes=0.1, batch_size=7, learning_rate=1e-5, warmup=3,
            decay=False, clip=1.0, ema=None, precision="bf16", split=2, seed=11,
            checkpoint_every=None, validate_every=5,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_command_of_a_recipe_trains_that_recipe(recipe: Recipe, monkeypatch) -> None:
    trained = []

    def note(recipe: Recipe, *_, **__):
        trained.append(recipe)
        raise UsageError("enough")

    monkeypatch.setattr("mmdgs.training.run.train_model", note)
    monkeypatch.delenv("MMDGS_DATA", raising=False)
    refused(shlex.split(recipe.command("some/where"))[1:])
    assert trained == [recipe]


# --- from data to a model


def test_train_writes_a_model_and_sample_reads_it(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "a [bold] name"
    result = run(cli.app, words(recipe, out))
    assert result.exit_code == 0, result.output
    assert "4 steps, loss" in said(result)
    assert result.output.strip().splitlines()[-1] == f"model: {out}"
    for name in ("config.json", "model.safetensors", "recipe.yaml", "best/config.json"):
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
    config = ["--config", str(out / "recipe.yaml"), "--out", str(again)]
    succeeds(["train", *config, "--device", "cpu"])
    assert (losses(again), weights(again)) == (losses(out), weights(out))

    picture, arrays, floats = (tmp_path / name for name in ("x.png", "x.npz", "floats.npz"))
    common = ["sample", str(out), *shlex.split("--n 5 --steps 2 --device cpu --seed 3 --out")]
    succeeds([*common, str(picture)])
    with Image.open(picture) as image:  # three columns, two rows, three times as large
        assert image.size == (3 * (3 * 10 + 2), 3 * (2 * 10 + 2))
    succeeds([*common, str(arrays)])
    stored = np.load(arrays)["arr_0"]
    settings = SamplerSettings(steps=2)
    expected = mmdgs.generate(mmdgs.load(str(out)), settings, 5, seed=3, progress=None).x
    assert stored.shape == (5, 8, 8, 1)
    np.testing.assert_array_equal(stored, to_uint8(expected).permute(0, 2, 3, 1).numpy())
    succeeds([*common, str(floats), "--float"])
    np.testing.assert_array_equal(np.load(floats)["x"], expected.numpy())
    assert "--float" in refused([*common, str(tmp_path / "y.png"), "--float"])
    assert not (tmp_path / "y.png").exists()
    # A file that is there is not overwritten unasked.
    assert "--overwrite" in refused([*common, str(arrays)])
    succeeds([*common, str(arrays), "--overwrite", "--covariance", "isotropic"])
    assert not np.array_equal(np.load(arrays)["arr_0"], stored)


def test_points_are_trained_on_and_sampled_as_arrays(tmp_path: Path) -> None:
    options = "--device cpu --steps 3 --sigma 0.5 --set network.width=8 --set limit=200"
    model = str(tmp_path / "m")
    succeeds(["train", "--data", "mog", "--model", "mlp", "--out", model, *options.split()])
    sample = ["sample", model, *shlex.split("--n 4 --steps 2 --device cpu --out")]
    succeeds([*sample, str(tmp_path / "x.npz")])
    points = np.load(tmp_path / "x.npz")["x"]
    assert points.shape == (4, 2)
    assert points.dtype == np.float32
    assert ".npz" in refused([*sample, str(tmp_path / "x.png")])


def test_a_classifier_learns_from_subfolders(tmp_path: Path) -> None:
    for i, name in enumerate(("bright", "dark")):
        images = random_images(20, (1, 12, 12), seed=i) // 2 + 127 * (name == "bright")
        save_pictures(tmp_path / "data" / name, images)
    options = (
        "--model classifier --param classes --set network.width=8 --steps 30 --batch-size 16 "
        "--learning-rate 0.01 --set warmup=0 --device cpu"
    )
    out = tmp_path / "m"
    succeeds(["train", "--data", str(tmp_path / "data"), "--out", str(out), *options.split()])
    model = mmdgs.load(out)
    assert model.config.classes == ("bright", "dark")
    means = torch.tensor([0.75, 0.25])[:, None, None, None].expand(2, 1, 12, 12)
    assert model.network(means).argmax(1).tolist() == [0, 1]
    values = losses(out)
    assert values[-1] < 0.5 * values[0]
    picture = ["--out", str(tmp_path / "x.png"), "--device", "cpu"]
    assert "classes" in refused(["sample", str(out), *picture])


def test_many_levels_are_trained_at_and_saved(recipe: Recipe, tmp_path: Path) -> None:
    recipe = at_many_levels(recipe)
    succeeds(words(recipe, tmp_path))
    model = mmdgs.load(tmp_path)
    assert model.levels == geometric(7, 10, 0.05)
    assert model.network.conditional
    assert model.config.isotropic_variance is None
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    for folder in (tmp_path, tmp_path / "best"):
        card = (folder / "README.md").read_text()
        assert "| noise levels | 7, sigma 10 to 0.05, alpha 1 |" in card
        assert "--levels geometric:7:10:0.05 --weighting edm" in card
        assert "model.level," not in card  # which would be refused
    x_t = torch.randn(2, 1, 8, 8, generator=seeded(0))
    moments = model.posterior(mmdgs.covariances.Diagonal(probes=1))
    for level in model.levels[::3]:
        assert torch.isfinite(moments(x_t, level, generator=seeded(0)).mean).all()


def test_networks_take_the_level_where_there_are_many(recipe: Recipe) -> None:
    for levels, expected in ((None, False), ("linear:5", True)):
        sigma = None if levels else 0.5
        plain = dataclasses.replace(recipe, sigma=sigma, levels=levels, network={"width": 8})
        for name, shape in (("unet-tiny", (1, 8, 8)), ("mlp", (2,))):
            model = new_model(dataclasses.replace(plain, model=name), shape)
            assert model.network.conditional is expected
    model = new_model(dataclasses.replace(plain, network={"conditional": False}), (1, 8, 8))
    assert not model.network.conditional  # as it was asked for
    assert model.levels == variance_preserving_linear(5)
    with pytest.raises(UsageError, match="classifier"):
        new_model(dataclasses.replace(plain, model="classifier", network={}), (1, 12, 12))


def test_what_goes_with_many_levels_unless_said() -> None:
    weightings = {"edm": "edm", "noise": "ncsnv2", "mean-std": None}
    for param, weighting in weightings.items():
        recipe = Recipe(param=param, levels="edm:18")
        assert (recipe.weighting, recipe.level_draw) == (weighting, "uniform")
    # A recipe of one level has none of these keys: a run that was begun before there were any can
    # go on.
    assert (Recipe(sigma=0.5).weighting, Recipe(sigma=0.5).level_draw) == (None, None)


@pytest.mark.parametrize(
    ("weighting", "draw", "jitter"),
    [("ncsnv2", "uniform", None), ("edm", "lognormal", None), ("edm", "uniform", 0.3)],
)
def test_a_recipes_weighting_draw_and_jitter_are_those_of_its_loss(
    weighting: str, draw: str, jitter: float | None, recipe: Recipe, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(
        at_many_levels(recipe), weighting=weighting, level_draw=draw, level_jitter=jitter
    )
    recipe = with_settings(recipe, steps=1, learning_rate=1e-12, warmup=0, ema=None)
    train_model(recipe, tmp_path, progress=None)
    seed = child_seed(0, "run 0")
    model, streams = mmdgs.load(tmp_path), Streams(seed, 8, purpose="noise")
    sets = read_sets(recipe, torch.device("cpu"))
    x = sets.train.take(next(batch_order(len(sets.train), 8, seed)), streams)
    levels = level_draw(model.levels, draw)(x, streams)
    stated = jittered(levels, 0.3, x, streams) if jitter else None
    weigh = mmdgs.losses.WEIGHTINGS[weighting]
    expected = mmdgs.losses.dsm(
        model.denoiser_of(model.network),
        x,
        levels,
        generator=streams,
        weighting=weigh,
        stated=stated,
    )
    expected = expected.mean().item()
    assert losses(tmp_path) == [pytest.approx(expected, rel=1e-4)]


def test_smaller_copies_are_the_images_at_fewer_pixels_and_never_below_the_crop(
    tmp_path: Path,
) -> None:
    ramps = [np.linspace(0, top, 40 * 24 * 3).reshape(40, 24, 3) for top in (90, 170, 250)]
    for i, ramp in enumerate(ramps):  # the first is held out
        Image.fromarray(ramp.round().astype(np.uint8)).save(tmp_path / f"{i}.png")
    recipe = Recipe(data=str(tmp_path), crop=20, smaller=2, param="score", sigma=0.5)
    train = read_sets(recipe, torch.device("cpu")).train
    assert len(train) == 6
    sides = train.table[:, 1:]
    assert sides[:2].tolist() == [[40, 24]] * 2
    assert sides[2:].tolist() == [[max(20, h), max(20, w)] for h, w in sides[2:].tolist()]
    assert (sides[2:, 0] >= 24).all()  # 0.6 of 40
    assert (sides[2:, 0] <= 38).all()
    assert len(sides[2:, 0].unique()) > 1
    for i in range(2, 6):
        first, pixels = train.table[i, 0], sides[i].prod()
        copy = train.pixels[:, first : first + pixels].double()
        whole = torch.from_numpy(ramps[1 + i % 2].round()).double()
        assert abs(copy.mean() - whole.mean()) < 1
        assert abs(copy.std() - whole.std()) < 2
    assert len(read_sets(dataclasses.replace(recipe, smaller=0), torch.device("cpu")).train) == 2


# --- misuse

MISUSE = {
    "no sigma": ("--param energy", "sigma"),
    "unknown option of the network": ("--sigma 1 --set network.depht=3", "'depht'"),
    "a network for points": ("--sigma 1 --model mlp", "shape (1, 8, 8)"),
    "a network for images": ("--sigma 1 --data mog", "shape (2,)"),
    "no labels": ("--param classes --model classifier", "no labels"),
    "no end": ("--sigma 1 --set steps=none", "when training ends"),
    "a device": ("--sigma 1 --device abacus", "'abacus'"),
    "both": ("--sigma 1 --resume --overwrite", "choose one of --resume"),
}


@pytest.mark.parametrize("case", MISUSE.values(), ids=MISUSE.keys())
def test_misuse_of_train_is_status_2_and_leaves_nothing_in_the_way(
    case, pictures: Path, tmp_path: Path
) -> None:
    more, message = case
    out = tmp_path / "out"
    common = ["train", "--data", str(pictures), "--model", "unet-tiny", "--out", str(out)]
    assert message in refused([*common, *more.split()])
    # Nothing is left behind: the corrected command must not be told that the folder is not empty.
    assert not out.exists()


def test_a_folder_that_is_not_empty(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "--overwrite" in refused(words(recipe, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt"]
    succeeds(words(recipe, tmp_path, "--overwrite"))
    other = with_settings(recipe, seed=5, steps=3)
    succeeds(words(other, tmp_path, "--overwrite"))
    assert len(losses(tmp_path)) == 3
    train_model(other, tmp_path / "fresh", progress=None)
    assert losses(tmp_path / "fresh") == losses(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- going on


def test_a_run_does_not_go_on_with_other_images(recipe: Recipe, tmp_path: Path) -> None:
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    shutil.copytree(recipe.data, pictures)
    own = dataclasses.replace(recipe, data=str(pictures))
    succeeds(words(with_settings(own, steps=2), out))
    checkpoint = (out / "checkpoints" / "last" / "state.json").read_bytes()
    file = sorted(pictures.rglob("*.png"))[5]
    content = file.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.rotate(90).save(file)
    assert "other settings (images was" in refused(words(own, out, "--resume"))
    assert (out / "checkpoints" / "last" / "state.json").read_bytes() == checkpoint
    file.write_bytes(content)
    succeeds(words(own, out, "--resume"))


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
        message = refused(words(recipe, out), status=130)
    assert "is of step 4. To go on from it: the same command with --resume" in message
    assert not (out / "config.json").exists()
    assert "resuming after step 4" in succeeds(words(recipe, out, "--resume"))
    assert losses(out) == losses(whole)
    for folder in ("", "best"):
        assert weights(out / folder) == weights(whole / folder)
    # A run that is done has nothing more to do; with more steps it goes on.
    succeeds(words(recipe, out, "--resume"))
    assert losses(out) == losses(whole)
    succeeds(words(with_settings(recipe, steps=7), out, "--resume"))
    assert len(losses(out)) == 7


def test_resuming_with_other_settings_names_the_key(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    other = with_settings(dataclasses.replace(recipe, sigma=0.7), learning_rate=0.5)
    message = refused(words(other, tmp_path, "--resume"))
    assert "learning_rate was 0.001, now 0.5" in message
    assert "sigma was 0.5, now 0.7" in message
    assert read_recipe(tmp_path / "recipe.yaml") == recipe


def test_resuming_without_a_checkpoint_overwrites_nothing(recipe: Recipe, tmp_path: Path) -> None:
    train_model(recipe, tmp_path, progress=None)
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    message = refused(words(with_settings(recipe, steps=6), tmp_path, "--resume"))
    assert "use --overwrite to start anew" in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def at_points(out: Path, steps: int) -> list[str]:
    """The command that trains a perceptron on points, its checkpoints far apart."""
    options = (
        "--data mog --model mlp --sigma 0.5 --device cpu --set network.width=8 "
        "--set network.depth=1 --set decay=false --set checkpoint_every=1000000 "
        "--set validate_every=1000000"
    )
    return ["train", *options.split(), "--out", str(out), "--steps", str(steps)]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_from_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mmdgs", *at_points(out, 100_000_000)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        metrics_file = out / "metrics.jsonl"
        assert wait_until(lambda: metrics_file.is_file() and len(losses(out)) > 0, process)
        process.send_signal(number)
        errors = " ".join(process.communicate(timeout=100)[1].split())
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    step = last_step(out)
    assert f"is of step {step:,}. To go on from it: the same command with --resume" in errors
    assert len(losses(out)) == step, "every step that was taken is in both"
    message = succeeds([*at_points(out, step + 20), "--resume"])
    assert f"resuming after step {step:,}" in message
    succeeds(at_points(tmp_path / "whole", step + 20))
    assert losses(out) == losses(tmp_path / "whole")
    assert weights(out) == weights(tmp_path / "whole")


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 100
) -> bool:
    """Whether a condition comes true while a process runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_loss_that_blows_up_is_status_1(recipe: Recipe, tmp_path: Path) -> None:
    recipe = with_settings(recipe, learning_rate=1e30, warmup=0, steps=9)
    assert "is not finite at step" in refused(words(recipe, tmp_path), status=1)


@pytest.fixture
def room():
    """Let the operating system refuse files larger than some bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python's way: a write fails in place of a signal.
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
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
    again = words(with_settings(recipe, steps=6, checkpoint_every=2), out, "--resume")
    message = refused(again, status=1)
    room(resource.RLIM_INFINITY)
    assert "the checkpoint at step 4" in message
    assert "File too large" in message
    assert {path.name: path.read_bytes() for path in before.iterdir()} == kept
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["last"]
    assert sorted(path.name for path in out.rglob(".*")) == [".lock"]
    succeeds(again)
    assert losses(out) == losses(whole)


def test_a_run_begun_anew_removes_the_old_model(recipe: Recipe, tmp_path: Path) -> None:
    # Else a kill would leave the old weights in the folder, to pass for those of the new recipe.
    train_model(recipe, tmp_path, progress=None)
    folder = RunFolder(tmp_path, {})
    folder.clear()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "recipe.yaml"}


# --- several processes


IN_TWO = """
import sys
from accelerate import Accelerator, DistributedDataParallelKwargs
from mmdgs import cli
from mmdgs.training import read_recipe, train_model

folder, *command = sys.argv[1:]
unused = DistributedDataParallelKwargs(find_unused_parameters=True)
both = Accelerator(cpu=True, kwargs_handlers=[unused])
runs = (("many", "many", False), ("second", "second", False), ("longer", "second", True))
for name, out, resume in runs:
    recipe = read_recipe(f"{folder}/{name}.yaml")
    train_model(recipe, f"{folder}/two/{out}", resume=resume, accelerator=both)
cli.app(command)
"""
"""All that two processes are tested with, since starting them takes most of the time."""


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, network={"multipliers": [1], "dropout": 0.1})
    recipe = with_settings(recipe, split=2, clip=10.0, checkpoint_every=3)
    many = at_many_levels(recipe)
    train_model(recipe, tmp_path / "one" / "only", progress=None)
    second = dataclasses.replace(many, init=str(tmp_path / "one" / "many"))
    second = with_settings(second, watch=4, watch_every=2, steps=2, decay=False)
    recipes = {"many": many, "second": second, "longer": with_settings(second, steps=4)}
    for name, recipe_of_one in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe_of_one.to_dict()))
        train_model(recipe_of_one, tmp_path / "one" / name, progress=None)
    (tmp_path / "two").mkdir()
    (tmp_path / "in_two.py").write_text(IN_TWO)
    launch = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")
    more = [str(tmp_path / "in_two.py"), str(tmp_path), *words(recipe, tmp_path / "two" / "only")]
    both = subprocess.run([sys.executable, *launch, *more], capture_output=True, timeout=200)
    assert both.returncode == 0, both.stderr.decode()
    assert both.stdout.decode().count("model:") == 1
    for name, whole in (("only", "only"), ("many", "many"), ("second", "longer")):
        one, two = tmp_path / "one" / whole, tmp_path / "two" / name
        assert [line["step"] for line in metrics(two) if "loss" in line] == [1, 2, 3, 4]  # once
        assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    second = tmp_path / "two" / "second"
    assert [line["step"] for line in metrics(second) if "diversity" in line] == [2, 4]
    assert mmdgs.load(second).config.trained_images == (4 + 4) * 8
    one, two = (
        mmdgs.load(tmp_path / name / "only").config.isotropic_variance for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_a_batch_that_processes_cannot_share() -> None:
    model = tiny_model()
    three = SimpleNamespace(num_processes=3, process_index=0, is_main_process=True)
    with pytest.raises(UsageError, match="batch_size 8"):
        Trainer(
            model.network,
            loss_of(model),
            ImageExamples(random_images(20)),
            TrainingSettings(steps=1, batch_size=8),
            accelerator=three,  # type: ignore[arg-type]
        )


# --- what a recipe says of the data


def test_mirrored_images_where_the_recipe_says_so(recipe: Recipe) -> None:
    for flips, expected in ((None, False), (False, False), (True, True)):
        sets = read_sets(dataclasses.replace(recipe, flips=flips), torch.device("cpu"))
        assert sets.train.flips is expected
        assert sets.held_out.flips is False  # the held-out images are as they are
