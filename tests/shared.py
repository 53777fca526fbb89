"""Reference files beside the repository, in ../shared: tests that need them are skipped where they
are absent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

SHARED = Path(__file__).parents[2] / "shared"
NCSNV2 = SHARED / "reference" / "ncsnv2"
CIFAR10_FILES = SHARED / "data" / "cifar10"
MNIST_FILES = SHARED / "data" / "mnist"
FACES = SHARED / "data" / "celeba" / "faces64.zip"
CIFAR10_DDPM = SHARED / "models" / "cifar10_ddpm_unet2d"


def _needs(path: Path) -> pytest.MarkDecorator:
    reason = f"no shared/{path.relative_to(SHARED)} beside this repository"
    return pytest.mark.skipif(not path.exists(), reason=reason)


needs_ncsnv2 = _needs(NCSNV2)
needs_cifar10_ddpm = _needs(CIFAR10_DDPM)
needs_cifar10_files = _needs(CIFAR10_FILES)
needs_mnist_files = _needs(MNIST_FILES)
needs_faces = _needs(FACES)


def cifar10_test_images(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Images, uint8 (rows * columns, 3, 32, 32), and labels, from the sheet of 100 x 100."""
    sheet = np.asarray(Image.open(CIFAR10_FILES / "test.webp").convert("RGB"))
    tiles = sheet.reshape(100, 32, 100, 32, 3)[:rows, :, :columns].transpose(0, 2, 4, 1, 3)
    labels = np.load(CIFAR10_FILES / "labels.npz")["test"].reshape(100, 100)[:rows, :columns]
    images = tiles.reshape(-1, 3, 32, 32).copy()
    return torch.from_numpy(images), torch.from_numpy(labels.reshape(-1))
