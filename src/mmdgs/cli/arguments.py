"""The words `[MODEL] IMAGES...` of a command: which model, and which images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mmdgs.errors import UsageError, nearest

Words = Annotated[
    list[str],
    Argument(
        metavar="[MODEL] IMAGES...",
        show_default=False,
        help="Images: files, folders, .zip, .npz, .npy, or sets (cifar10:test); before them the "
        "model, if it is not photo: one that ships (celeba), a folder, a .pth, or owner/name.",
    ),
]
ModelOption = Annotated[
    str | None, Option("--model", "-m", help="The model; then all words are images.")
]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_and_images(words: list[str], model: str | None) -> tuple[str, list[str]]:
    """The model's name and the sources of images in `[MODEL] IMAGES...` and --model.

    The first word is the model if it is the name of one that ships, a model's folder, a checkpoint,
    or owner/name and no path. Without one the model is the one for photographs.
    """
    from mmdgs.models.shipped import PHOTO

    if model is not None:
        return model, words
    if not _is_model(words[0]):
        _require_images(words[0])
        return PHOTO, words
    if len(words) == 1:
        raise UsageError(f"no images are given: {words[0]!r} is a model, and they come after it")
    return words[0], words[1:]


def _is_model(word: str) -> bool:
    """Whether a first word names a model; what may be a model or images is refused."""
    from mmdgs.models.loading import CHECKPOINTS, is_model_folder
    from mmdgs.models.shipped import SHIPPED

    path = Path(word).expanduser()
    if path.is_dir() and is_model_folder(path):
        return True
    if word in SHIPPED:
        if path.exists():
            raise UsageError(
                f"{word!r} is a model that ships, and a file or folder here: say --model {word} "
                f"for the model, ./{word} for the images"
            )
        return True
    if path.exists():
        return path.suffix in CHECKPOINTS
    images_here = "/" in word and Path(word).parent.is_dir()
    return bool(HUB_NAME.fullmatch(word)) and not images_here and not _is_file_name(path)


def _is_file_name(path: Path) -> bool:
    from mmdgs.data.folders import SUFFIXES
    from mmdgs.models.loading import CHECKPOINTS

    return path.suffix.lower() in (*SUFFIXES, *CHECKPOINTS, ".npy", ".npz", ".zip")


def _require_images(word: str) -> None:
    """Refuse a first word that is neither images nor a model, and name what is like it."""
    from mmdgs.data.folders import PARTS
    from mmdgs.data.images import NAMES
    from mmdgs.models.shipped import SHIPPED

    path, (name, _, split) = Path(word).expanduser(), word.rpartition(":")
    if path.exists() or (name and split in PARTS):
        return
    here = path.parent.glob("*") if path.parent.is_dir() else []
    sets = (f"{name}:test" for name in NAMES)
    like = nearest(word, [*map(str, here), *SHIPPED, *sets])
    raise UsageError(
        f"there is no image, set or model {word!r}{like}: expected [MODEL] IMAGES..., such as "
        "photo.jpg, or celeba face.png"
    )
