"""Images of one's own, from a folder or a zip: its parts for training and testing, and labels from its subfolders.

A folder may say itself what is for what, with a subfolder `train` and one of `test`, `valid` or `val`; what lies
elsewhere is then left alone. Otherwise every 20th image in the order of the names, beginning with the first, is
held out for "test" (or "valid", which is the same), and the others are for "train".

Where each image lies in exactly one subfolder (of its part, or of all), the subfolders are its classes. A folder
that holds all the rest is looked through, as zips have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmdgs.data.gallery import Reading, open_gallery, read_images
from mmdgs.data.imageset import ImageSet
from mmdgs.data.sources import check_split
from mmdgs.errors import UsageError

HELD_OUT = 20
PARTS = {"train": ("train",), "test": ("test", "valid", "val"), "valid": ("valid", "val", "test")}
"""The subfolders that stand for a split; the first that is there counts."""


@dataclass(frozen=True)
class Member:
    """An image of a folder: its name, and the parts of its path that carry meaning."""

    name: str
    parts: tuple[str, ...]


def load_folder(path: Path, split: str, reading: Reading) -> ImageSet:
    """The part of a folder or zip of images that a split stands for."""
    check_split(str(path), split, tuple(PARTS))
    with open_gallery(path) as gallery:
        members, classes = choose(gallery.names, split)
        if not members:
            raise UsageError(
                f"{path} holds {len(gallery.names)} image and none is left for the split {split!r}; "
                "expected at least 2, since one is held out"
            )
        pictures = read_images(gallery, [member.name for member in members], reading)
    labels = None
    if classes:
        labels = torch.tensor([classes.index(members[i].parts[0]) for i in pictures.indices])
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return ImageSet(name, split, pictures.images, labels, classes, pictures.skipped)


def choose(names: Sequence[str], split: str) -> tuple[list[Member], tuple[str, ...]]:
    """The images of a split, and the classes of all splits together, so that a label means the same in each."""
    members = _looked_through([Member(name, tuple(name.split("/"))) for name in names])
    folders = {member.parts[0] for member in members if len(member.parts) > 1}
    train, test = (_part(folders, which) for which in ("train", "test"))
    if train and test:
        chosen = _part(folders, split)
        used = folders & {part for parts in PARTS.values() for part in parts}
        inside = [member for member in members if len(member.parts) > 1 and member.parts[0] in used]
        below = [Member(member.name, member.parts[1:]) for member in inside]
        mine = [member for member, whole in zip(below, inside, strict=True) if whole.parts[0] == chosen]
        return mine, _classes(below)
    mine = [member for i, member in enumerate(members) if (i % HELD_OUT == 0) == (split != "train")]
    return mine, _classes(members)


def _part(folders: set[str], split: str) -> str | None:
    return next((part for part in PARTS[split] if part in folders), None)


def _looked_through(members: list[Member]) -> list[Member]:
    """Without the folders that hold all the rest."""
    while all(len(member.parts) > 1 for member in members) and len({member.parts[0] for member in members}) == 1:
        members = [Member(member.name, member.parts[1:]) for member in members]
    return members


def _classes(members: Sequence[Member]) -> tuple[str, ...]:
    if any(len(member.parts) != 2 for member in members):
        return ()
    return tuple(sorted({member.parts[0] for member in members}))
