"""CIFAR-10 at one level as an experiment: chains whatever their blocks, verdicts, and models that are refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import concluded, picture_folder, use_fake_inception
from nets import lively, tiny_model
from shared import cifar10_test_images, needs_cifar10_files
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, load, save
from mmdgs.data import midpoints
from mmdgs.errors import UsageError
from mmdgs.lab import Context, Workspace, cifar10, sampler_cells, single_level_chains
from mmdgs.lab.cifar10_collapse import class_verdict, collapse_verdict
from mmdgs.lab.cifar10_report import fid_verdict, minimum
from mmdgs.lab.single_level_chains import DIAGONAL, DRAWS, MEANS, PAPERS, ROWS, SPECTRAL, Chains
from mmdgs.models import Model, ModelConfig
from mmdgs.moments import DiagonalMoments
from mmdgs.networks import preset
from mmdgs.noise import CLEAN
from mmdgs.randomness import Streams, randn
from mmdgs.samplers import Gibbs, State

SHAPE = (3, 12, 12)
TINY = replace(
    cifar10.QUICK, images=6, steps=(1, 2, 3), block=4, long_chains=5, long_steps=(0, 1, 2), map_images=2,
    fit_images=4, batch_size=3, reference_limit=None, metrics=("fid", "diversity"),
)  # fmt: skip


def classifier() -> Model:
    network, options = preset("classifier")
    config = ModelConfig(network, "classes", SHAPE, {**options, "width": 4, "features": 8}, classes=("cat", "dog"))
    model = Model.build(config)
    lively(model.network)
    model.network.eval()
    return model


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Tiny networks of one level and of five, a classifier, a folder in the place of CIFAR-10, a fake Inception."""
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    save(many_level_model(SHAPE), tmp_path / "many")
    save(classifier(), tmp_path / "classifier")
    folder = str(picture_folder(tmp_path / "images", shape=SHAPE))
    for module in (cifar10, single_level_chains):
        monkeypatch.setattr(module, "DATA", folder)
    monkeypatch.setattr(cifar10, "FULL", TINY)
    use_fake_inception(tmp_path, monkeypatch)
    names = {name: str(tmp_path / folder) for name, folder in (("model", "one"), ("many", "many"))}
    return Context(
        Workspace(tmp_path / "out"), torch.device("cpu"), classifier=str(tmp_path / "classifier"), **names
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_it_measures_and_draws_all_and_resumes_without_work(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, text = concluded(cifar10, prepared)
    kinds = {"draws": ["1", "2", "3"], "means": ["1", "2", "3"]}
    assert {
        row: {kind: list(cells) for kind, cells in one.items()} for row, one in records["curves"].items()
    } == dict.fromkeys(ROWS, kinds)
    cells = [cell for row in records["curves"].values() for kind in row.values() for cell in kind.values()]
    assert all(cell["fid"] > 0 for cell in cells)
    assert {row: list(one) for row, one in records["collapse"].items()} == {PAPERS: ["1", "2"], SPECTRAL: ["1", "2"]}
    assert set(records["beside"]) == {"data (test images)", "many levels, Gibbs"}
    long = [one for row in records["collapse"].values() for one in row.values()]
    for one in (*long, *records["beside"].values()):
        assert sum(one["class_shares"]) == pytest.approx(1)
    assert set(records["maps"]["errors"]) == {"Rademacher, 1", "Rademacher, 10", "lattice, 3", "one variance for all"}
    pictures = {"cifar10_maps", "cifar10_fid", "cifar10_collapse"}
    pictures |= {f"cifar10_{name}{row}" for name in ("chains", "25_chains") for row in ("", "_spectral")}
    assert {f.stem for f in (tmp_path / "out").glob("*.png")} == pictures
    for row in ROWS:
        assert f"{row.capitalize() if row != PAPERS else 'Diagonal, from N(0, I)'}: the FID is lowest after" in text
    assert "Of means, at their best numbers of steps: " in text
    assert "Spectral covariance, from uniform noise. After 2 steps" in text
    assert "many levels have" in text
    monkeypatch.setattr(single_level_chains, "run", None)  # nothing is run again
    monkeypatch.setattr(sampler_cells, "generate", None)
    again = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True))
    assert json.loads(json.dumps(cifar10.run(again).records["curves"])) == records["curves"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_more_images_reuse_the_blocks_that_are_there(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(prepared, images=4, many=None, classifier=None)
    _, text = concluded(cifar10, few)
    assert "No model of many levels was named" in text
    rows: list[int] = []
    run = single_level_chains.run

    def noting(plan, x0, **options):  # type: ignore[no-untyped-def]
        rows.append(options["first_chain"])
        return run(plan, x0, **options)

    monkeypatch.setattr(single_level_chains, "run", noting)
    cifar10.run(replace(few, images=6, workspace=Workspace(tmp_path / "out", resume=True)))
    assert rows == [4] * len(ROWS)


def chains(tmp_path: Path, model: Model, name: str, batch_size: int, block: int) -> Chains:
    context = Context(Workspace(tmp_path / name), torch.device("cpu"), quick=True)
    return Chains(context, model, 2, 4, batch_size, block, "float32")


def test_chains_are_gibbs_sweeps_whatever_their_block(tmp_path: Path) -> None:
    model = tiny_model("score", SHAPE, sigma=0.3)
    found = chains(tmp_path, model, "a", 5, 5).states(PAPERS, 5, (0, 1, 3))
    cut = chains(tmp_path, model, "b", 2, 3).states(PAPERS, 5, (0, 1, 3))
    moments, level = DiagonalMoments(model, probes=2), model.levels[0]
    seed = single_level_chains.START_SEED
    x0 = randn((5, *SHAPE), torch.empty(0), Streams(seed, 5, purpose="start"))
    assert x0.std().item() == pytest.approx(1, abs=0.1)  # the paper's standard normal
    state, streams, means = State(x0), Streams(seed, 5, purpose="steps"), []

    def noting(x_t, level, *, generator):  # type: ignore[no-untyped-def]
        means.append(model(x_t, level))
        return moments(x_t, level, generator=generator)

    for _ in range(3):
        state, _ = Gibbs(noting).step(state, level, CLEAN, generator=streams)
    for kind, last in ((DRAWS, state.x), (MEANS, means[-1])):
        assert (found[kind].int() - cut[kind].int()).abs().max() <= 1  # another batch rounds differently
        expected = (last.detach().clamp(0, 1) * 255).round()
        assert (found[kind][2].float() - expected).abs().max() <= 1
    assert torch.equal(found[DRAWS][0], found[MEANS][0])  # the start
    assert not torch.equal(found[DRAWS][2], found[MEANS][2])


def test_other_rows_start_in_the_interval(tmp_path: Path) -> None:
    model = tiny_model("score", SHAPE, sigma=0.3)
    start = chains(tmp_path, model, "a", 5, 5).states(DIAGONAL, 5, (0, 1))[DRAWS][0].float() / 255
    assert start.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / start.numel()) ** 0.5)
    assert start.std().item() == pytest.approx((1 / 12) ** 0.5, rel=0.05)


# --- what the report says ---------------------------------------------------------------------------------------


STEPS = (10, 20, 40, 80, 100)


def test_the_minimum_of_a_curve() -> None:
    found = minimum(STEPS, (90.0, 60.0, 50.0, 70.0, 75.0))
    assert (found.steps, found.value, found.rose, found.fell) == (40, 50.0, True, True)
    assert found.rise == pytest.approx(0.5)
    assert not minimum(STEPS, (90.0, 60.0, 50.0, 50.5, 50.9)).rose  # a percent or two is luck
    assert not minimum(STEPS, (50.0, 60.0, 61.0, 62.0, 63.0)).fell


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            (90.0, 60.0, 50.0, 70.0, 75.0),
            "after 40 Gibbs steps, 50.00 (paper: near 40); after 100 it is 75.00, 50% higher",
        ),
        ((90.0, 60.0, 50.0, 70.0, 75.0), "a minimum and a later rise, as in the paper"),
        ((40.0, 30.0, 50.0, 70.0, 75.0), "a minimum and a later rise, as in the paper"),
        ((90.0, 60.0, 50.0, 45.0, 60.0), "a minimum and a later rise, at another place than in the paper"),
        ((90.0, 60.0, 50.0, 45.0, 45.5), "after 100 it is 45.50: the later rise that the paper shows did not come out"),
        ((90.0, 60.0, 50.0, 45.0, 40.0), "after 100 Gibbs steps, 40.00 (paper: near 40); the last that was tried"),
        ((50.0, 60.0, 65.0, 70.0, 75.0), "it only rises"),
    ],
)
def test_verdicts_on_the_fid(values: tuple[float, ...], words: str) -> None:
    assert words in fid_verdict("diagonal", STEPS, values)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.2, 1.0, 0.4), "The chains collapse, as the paper shows."),
        ((0.5, 0.6, 0.6), "They are too near, but do not come nearer."),
        ((1.5, 1.2, 1.0), "They come nearer, but are no nearer than data."),
        ((1.0, 1.0, 1.0), "No collapse is seen in this number."),
    ],
)
def test_verdicts_on_the_collapse(ratios: tuple[float, ...], words: str) -> None:
    said = collapse_verdict((10, 100, 1_000), ratios, 1.0)
    assert words in said
    assert f"After 1,000 steps a chain is {ratios[-1]:.2f} times as far" in said


def test_the_commonest_class_is_named() -> None:
    last = {"class_shares": [0.2, 0.8], "class_names": ["cat", "dog"], "class_entropy": 0.5}
    said = class_verdict(1_000, last, {"data": {"class_entropy": 0.69}})
    assert "after 1,000 steps is 0.50 (data 0.69); the commonest, dog, has 80% of the chains" in said


# --- bad input --------------------------------------------------------------------------------------------------


def test_a_model_of_many_levels_is_refused(tmp_path: Path) -> None:
    save(many_level_model(SHAPE), tmp_path / "many")
    words = ["reproduce", "cifar10", "--model", str(tmp_path / "many"), "--out", str(tmp_path / "out"), "--device"]
    result = CliRunner().invoke(cli.app, [*words, "cpu"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "must be a model of one noise level" in said
    assert "has 5" in said
    assert "mmdgs reproduce table2" in said


@pytest.mark.parametrize("name", ["one", "small"])
def test_the_model_of_many_levels_must_be_one(name: str, prepared: Context, tmp_path: Path) -> None:
    save(many_level_model((1, 12, 12)), tmp_path / "small")
    with pytest.raises(UsageError, match="--many must be a model of"):
        cifar10.run(replace(prepared, many=str(tmp_path / name)))


def test_the_model_of_many_levels_is_the_one_that_ships(prepared: Context) -> None:
    def beside(shape: tuple[int, ...]) -> Model:
        return tiny_model("score", shape, sigma=0.3)

    unnamed = replace(prepared, many=None)
    found = cifar10._many_model(unnamed, beside((3, 32, 32)))
    assert found is not None
    assert found.source == "cifar10"
    assert cifar10._many_model(unnamed, beside((3, 8, 8))) is None
    assert cifar10._many_model(replace(unnamed, quick=True), beside((3, 32, 32))) is None


def test_without_a_model_it_says_how_to_train_one(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "MODEL", "no-such-model")
    with pytest.raises(UsageError, match="train one with") as error:
        cifar10.run(replace(prepared, model=None))
    words = shlex.split(str(error.value).split("`")[1])
    given = []

    def caught(recipe, out, **options):  # type: ignore[no-untyped-def]
        given.append(recipe)
        raise UsageError("caught")

    monkeypatch.setattr(cli.models, "train_model", caught)
    assert CliRunner().invoke(cli.app, words[1:]).exit_code == 2
    (recipe,) = given
    training = recipe.training
    assert (recipe.data, recipe.param, recipe.sigma, recipe.model) == ("cifar10", "score", 0.3, "unet-paper")
    assert (training.epochs, training.steps, training.batch_size, training.learning_rate) == (1_000, None, 100, 1e-4)


# --- the classifier that ships --------------------------------------------------------------------------------------


def test_it_is_taken_where_none_is_named_and_images_have_its_size(prepared: Context) -> None:
    unnamed = replace(prepared, classifier=None)
    assert cifar10._classifier(unnamed, SHAPE) is None
    found = cifar10._classifier(unnamed, (3, 32, 32))
    assert found is not None
    assert found.config.classes[3] == "cat"
    named = cifar10._classifier(prepared, (3, 32, 32))
    assert named is not None
    assert named.config.classes == ("cat", "dog")


@needs_cifar10_files
def test_it_knows_four_of_five_images_and_counts_classes_right() -> None:
    images, labels = cifar10_test_images(rows=100, columns=20)
    with torch.no_grad():
        found = load("cifar10-classifier").network(midpoints(images)).argmax(1)
    assert (found == labels).double().mean() > 0.79
    assert (torch.bincount(found, minlength=10) - 200).abs().max() < 40
