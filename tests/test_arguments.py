"""`[MODEL] IMAGES...`: which word is a model, and which are images."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmdgs
from mmdgs.cli.arguments import model_and_images
from mmdgs.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, a model and a checkpoint."""
    for name in ("face.png", "holiday.v2", "net.pth", "photos/one.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("ours/config.json", "theirs/model_index.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words", ["face.png", "photos", "./photos/one.png", "holiday.v2", "cifar10:test", "photos:test"]
)
def test_without_a_model_it_is_the_one_for_photographs(words: str) -> None:
    assert model_and_images([words, "more"], None) == ("photo", [words, "more"])


@pytest.mark.parametrize(
    "model", ["celeba", "photo", "ours", "./theirs", "net.pth", "google/ddpm-celebahq-256"]
)
def test_the_first_word_may_be_a_model(model: str) -> None:
    assert model_and_images([model, "face.png", "photos"], None) == (model, ["face.png", "photos"])
    with pytest.raises(UsageError, match="no images are given"):
        model_and_images([model], None)


def test_with_the_option_all_words_are_images() -> None:
    assert model_and_images(["celeba", "face.png"], "ours") == ("ours", ["celeba", "face.png"])


@pytest.mark.parametrize("path", ["celeba/face.png", "celeba"])
def test_images_named_like_a_model_are_refused_with_the_two_ways_to_say_it(
    path: str, here: Path
) -> None:
    (here / path).parent.mkdir(exist_ok=True)
    (here / path).touch()
    for words in (["celeba"], ["celeba", "face.png"]):
        with pytest.raises(UsageError, match=r"--model celeba .* \./celeba"):
            model_and_images(words, None)
    assert model_and_images(["./celeba"], None) == ("photo", ["./celeba"])


def test_a_folder_of_images_does_not_hide_the_model_of_its_name(here: Path) -> None:
    (here / "mnist").mkdir()
    assert mmdgs.load("mnist").shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("fase.png", "face.png"),
        ("celeb", "celeba"),
        ("photos/on.png", "photos/one.png"),
        ("photos/on", "photos/one.png"),  # of a folder that is here: no name of the hub
        ("cifar10:tets", "cifar10:test"),
        ("net2.pth", "net.pth"),
    ],
)
def test_what_is_neither_gets_the_nearest_name(word: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        model_and_images([word, "face.png"], None)


@pytest.mark.parametrize("word", ["nowhere/face.jpg", "nowhere/face.npy", "a/b/c", "/a/b"])
def test_a_missing_file_is_no_name_of_the_hub(word: str) -> None:
    with pytest.raises(UsageError, match="no image, set or model"):
        model_and_images([word], None)
