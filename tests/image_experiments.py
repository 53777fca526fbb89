"""For tests of image experiments: a folder in the place of a data set, a fake Inception, whole and
resumed runs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_known, fake_script
from nets import random_images, save_pictures
from sizes import unpaint

from experiments import EXPERIMENTS, Context, Workspace
from mmdgs.metrics import inception_file
from mmdgs.report.page import Outcome


def picture_folder(folder: Path, count: int = 12, shape: tuple[int, int, int] = (3, 8, 8)) -> Path:
    """Random images as train/ and the same as test/."""
    save_pictures(folder / "train", random_images(count, shape))
    shutil.copytree(folder / "train", folder / "test")
    return folder


def use_fake_inception(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six known features in the place of Inception's, a cache of its own, and figures that are not
    painted.
    """
    monkeypatch.setenv("MMDGS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("MMDGS_INCEPTION", str(fake_script(folder / "fake.pt")))
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    unpaint(monkeypatch)


def performed(name: str, context: Context) -> tuple[dict[str, Any], Outcome]:
    """Run an experiment to its end: its records, and its report."""
    _, report = EXPERIMENTS[name].perform(context)
    return json.loads((context.workspace.out / "records.json").read_text()), report


def resumed(context: Context, **changes: Any) -> Context:
    """The same run once more, in the same folder."""
    context.workspace.close()
    return replace(context, workspace=Workspace(context.workspace.out, resume=True), **changes)


def pictures_of(context: Context) -> set[str]:
    """The names of the figures in the folder."""
    return {file.stem for file in context.workspace.out.glob("*.png")}
