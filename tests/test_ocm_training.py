"""Heads through the training engine, the command line and samplers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from nets import random_images, save_pictures, tiny_model, tiny_pipeline
from toy_models import many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, losses
from mmdgs.errors import UsageError
from mmdgs.models import Model, load, load_head
from mmdgs.randomness import Streams, seeded
from mmdgs.training import (
    Recipe,
    TrainingSettings,
    level_draw,
    loss_of,
    metrics,
    read_recipe,
    train_model,
)

run = CliRunner().invoke
pytestmark = pytest.mark.usefixtures("small_fits")
FAST = TrainingSettings(
    steps=4, batch_size=6, learning_rate=1e-2, ema=0.9, checkpoint_every=2, validate_every=2
)
SMALL = {"multipliers": [1]}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 8x8 grey images, some of them held out."""
    names = [f"{'test' if i % 5 == 0 else 'train'}/{i:02}" for i in range(30)]
    return save_pictures(tmp_path / "pictures", random_images(30, (1, 8, 8)), names)


def recipe(pictures: Path, denoiser: Path, **changes: object) -> Recipe:
    keys = {"model": "unet-tiny", "network": SMALL, "param": "variance-ratio", "training": FAST}
    return Recipe(**{"data": str(pictures), "denoiser": str(denoiser), **keys, **changes})


@pytest.fixture(params=[pytest.param("one level", marks=pytest.mark.slow), "many levels"])
def denoiser(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = tiny_model() if request.param == "one level" else many_level_model()
    return mmdgs.save(model, tmp_path / "denoiser")


def moved(by: float) -> Model:
    """The denoiser with other weights."""
    model = tiny_model()
    with torch.no_grad():
        next(model.network.parameters()).add_(by)
    return model


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


# --- training


def test_a_head_is_a_model_that_knows_its_denoiser(
    pictures: Path, denoiser: Path, tmp_path: Path
) -> None:
    before = (denoiser / "model.safetensors").read_bytes()
    head, trained = train_model(recipe(pictures, denoiser), tmp_path / "head", progress=None)
    assert (denoiser / "model.safetensors").read_bytes() == before
    known, again = load(denoiser), load(tmp_path / "head")
    assert again.config == head.config
    assert again.config.head["denoiser"] == known.digest
    assert again.levels == known.levels
    assert (len(trained.losses), len(trained.validations)) == (4, 2)
    for model in (again, load(tmp_path / "head" / "best")):
        assert len(model.config.ratio_scale.floors) == len(model.config.ratio_scale.ratios)
    assert known.digest in (tmp_path / "head" / "README.md").read_text()
    x_t = torch.rand(2, 1, 8, 8, generator=seeded(0))
    q = mmdgs.OcmMoments(known, load_head(tmp_path / "head", known))(x_t, known.levels[0])
    torch.testing.assert_close(q.mean, known(x_t, known.levels[0]))
    assert (q.cov.diagonal() > 0).all()
    assert Model.build(again.config).digest != again.digest  # training did move the weights


def test_the_batch_may_be_cut_and_the_run_resumed(
    pictures: Path, denoiser: Path, tmp_path: Path
) -> None:
    # Noise, levels and probes belong to the example: the same losses, up to the rounding of another
    # batch.
    whole, cut, stopped = (tmp_path / name for name in ("whole", "cut", "stopped"))
    train_model(recipe(pictures, denoiser), whole, progress=None)
    split = dataclasses.replace(FAST, split=3)
    train_model(recipe(pictures, denoiser, training=split), cut, progress=None)
    assert losses_of(cut) == pytest.approx(losses_of(whole), rel=1e-4)
    first = dataclasses.replace(FAST, steps=2)
    train_model(recipe(pictures, denoiser, training=first), stopped, progress=None)
    train_model(recipe(pictures, denoiser), stopped, resume=True, progress=None)
    assert losses_of(stopped) == losses_of(whole)


def test_a_run_goes_on_with_its_own_denoiser_only(pictures: Path, tmp_path: Path) -> None:
    folder = mmdgs.save(tiny_model(), tmp_path / "denoiser")
    train_model(recipe(pictures, folder), tmp_path / "head", progress=None)
    mmdgs.save(moved(1), folder)
    with pytest.raises(UsageError, match="weights of the denoiser was"):
        train_model(recipe(pictures, folder), tmp_path / "head", resume=True, progress=None)


def test_images_are_brought_to_the_denoisers_interval_and_size(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    tiny_pipeline(in_channels=3, out_channels=3).save_pretrained(tmp_path / "pipeline")
    for split in ("train", "test"):
        save_pictures(tmp_path / "pictures" / split, random_images(12, (3, 10, 10)))
    head, _ = train_model(
        recipe(tmp_path / "pictures", tmp_path / "pipeline"), tmp_path / "head", progress=None
    )
    assert head.config.shape == (3, 8, 8)
    assert head.config.interval == (-1.0, 1.0)
    assert len(head.levels) == 1000
    assert head.config.options["conditional"]
    # Uniform images have the standard deviation 1 / sqrt(3) in [-1, 1], and some less once resized;
    # half in [0, 1].
    assert 0.35 < head.config.head["scale"]["data_std"] < 0.58
    assert head.config.head["scale"]["ratios"][-1] > 100
    # The loss of images in [0, 1] is the loss of the same in [-1, 1].
    known, x = load(tmp_path / "pipeline"), torch.rand(2, 3, 8, 8, generator=seeded(0))
    probes = recipe(tmp_path / "pictures", tmp_path / "pipeline").probes
    loss = loss_of(head, denoiser=known, probes=probes)(x, Streams(1, 2))
    ratio_head, streams = head.head_of(head.network), Streams(1, 2)
    level = level_draw(known.levels)(x, streams)
    weight = ratio_head.scale.weight
    expected = losses.ocm(
        ratio_head, known, 2 * x - 1, level, generator=streams, probes=probes, weight=weight
    )
    torch.testing.assert_close(loss, expected)


def test_points_have_perceptrons(tmp_path: Path) -> None:
    model = Model.build(
        mmdgs.models.ModelConfig("mlp", "score", (2,), {"width": 8, "depth": 1}, sigma=0.5)
    )
    folder = mmdgs.save(model, tmp_path / "denoiser")
    options = {"model": "mlp", "network": {"width": 8, "depth": 1}, "limit": 50}
    head, _ = train_model(
        recipe(Path("rings"), folder, **options), tmp_path / "head", progress=None
    )
    assert head.config.inputs == 4
    assert head.config.outputs == 2


OCM = {"loss": "ocm", "denoiser": "mnist"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loss": "ocm"}, "--denoiser"),
        ({"loss": "dsm", "sigma": 0.5, "denoiser": "mnist"}, "denoiser is for the loss"),
        ({"loss": "kl", "param": "mean-std", "sigma": 0.5, "probes": 2}, "probes is for the loss"),
        ({**OCM, "sigma": 0.5}, "leave sigma"),
        ({**OCM, "probes": 0}, "got 0"),
        ({**OCM, "param": "energy"}, "'energy' needs the loss 'dsm'"),
        ({**OCM, "weighting": "edm"}, "weighting is for the loss"),
    ],
)
def test_recipes_that_cannot_be(table: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(None, table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"denoiser": "there/is/none"}, "there is no folder of this name here"),
        ({"data": "rings"}, r"have shape \(2,\), and the denoiser .* takes \(1, 8, 8\)"),
        ({"model": "mlp", "network": {}}, "'mlp' is no head for data of shape"),
        ({"model": "ncsnv2", "network": {}}, "'ncsnv2' is no head"),
        ({"levels": "geometric:4:2:0.1"}, "alone: leave levels out"),
    ],
)
def test_trainings_that_cannot_be(
    changes: dict[str, object], message: str, pictures: Path, tmp_path: Path
) -> None:
    folder = mmdgs.save(tiny_model(), tmp_path / "denoiser")
    keys = {"pictures": pictures, "denoiser": folder, **changes}
    with pytest.raises(UsageError, match=message):
        train_model(recipe(**keys), tmp_path / "head", progress=None)


# --- from the command line to samples


def command(*words: object) -> str:
    result = run(cli.app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def trained_by_command(pictures: Path, denoiser: Path, out: Path) -> None:
    command(
        "train", "--loss", "ocm", "--denoiser", denoiser, "--data", pictures,
        "--model", "unet-tiny", "--steps", 2, "--batch-size", 4, "--probes", 2, "--device", "cpu",
        "--out", out, "--set", "network.multipliers=[1]",
    )  # fmt: skip


def test_train_and_sample(pictures: Path, denoiser: Path, tmp_path: Path) -> None:
    trained_by_command(pictures, denoiser, tmp_path / "head")
    many = len(load(denoiser).levels) > 1
    for sampler, steps in (("gibbs", 3), *((("gibbs-down", 3), ("ancestral", 3)) if many else ())):
        out = tmp_path / f"{sampler}.npz"
        command(
            "sample", denoiser, "--sampler", sampler, "--steps", steps, "--n", 2,
            "--covariance", "ocm", "--head", tmp_path / "head", "--clip", "--device", "cpu",
            "--out", out,
        )  # fmt: skip
        (file,) = tmp_path.glob(f"{out.stem}*.samples.json")
        record = json.loads(file.read_text())
        assert record["cost"]["products"] == 0
        assert record["cost"]["forwards"] >= steps
        assert len(record["settings"]["head"]) == 64
        assert record["settings"]["sampler"]["covariance"]["name"] == "ocm"


def test_heads_are_refused_where_they_do_not_belong(pictures: Path, tmp_path: Path) -> None:
    denoiser = mmdgs.save(tiny_model(), tmp_path / "denoiser")
    trained_by_command(pictures, denoiser, tmp_path / "head")
    other = mmdgs.save(moved(1e-3), tmp_path / "other")
    large = mmdgs.save(tiny_model(shape=(1, 12, 12)), tmp_path / "large")
    ocm = ["--covariance", "ocm"]
    head = [*ocm, "--head", tmp_path / "head"]
    for model, words, message in (
        (denoiser, ocm, "needs its head"),
        (denoiser, ["--head", tmp_path / "head"], "takes no head"),
        (denoiser, [*ocm, "--head", denoiser], "its output is 'energy'"),
        (denoiser, [*ocm, "--head", tmp_path / "none"], "no folder of this name"),
        (other, head, "those of another model"),
        (large, head, "(1, 8, 8)"),
        (tmp_path / "head", [], "is no denoiser"),
    ):
        words = ["sample", model, "--device", "cpu", "--out", tmp_path / "x.png", *words]
        result = run(cli.app, list(map(str, words)))
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
