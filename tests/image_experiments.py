"""What experiments on images need in tests: a folder in the place of a data set, a fake Inception, and a whole run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import fake_known, fake_script
from nets import random_images
from PIL import Image

from mmdgs.lab import Context, conclude
from mmdgs.metrics import inception_file


def picture_folder(folder: Path, count: int = 12, shape: tuple[int, int, int] = (3, 8, 8)) -> Path:
    """Random images as train/ and the same as test/."""
    for i, image in enumerate(random_images(count, shape)):
        file = folder / "train" / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    shutil.copytree(folder / "train", folder / "test")
    return folder


def use_fake_inception(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six known features in the place of Inception's, and a cache of its own."""
    monkeypatch.setenv("MMDGS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("MMDGS_INCEPTION", str(fake_script(folder / "fake.pt")))
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())


def concluded(experiment: ModuleType, context: Context) -> tuple[dict[str, Any], str]:
    """Run an experiment to its end: its records, and the text of its report."""
    page, _ = conclude(context, "t", "s", experiment.run(context))
    return json.loads((context.workspace.out / "records.json").read_text()), page.read_text()
