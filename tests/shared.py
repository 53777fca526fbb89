"""Reference files beside the repository, in ../shared: tests that need them are skipped where they are absent."""

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

needs_ncsnv2 = pytest.mark.skipif(not NCSNV2.is_dir(), reason="no shared/reference/ncsnv2 beside this repository")
needs_cifar10_ddpm = pytest.mark.skipif(
    not CIFAR10_DDPM.is_dir(), reason="no shared/models/cifar10_ddpm_unet2d beside this repository"
)
needs_cifar10_files = pytest.mark.skipif(
    not CIFAR10_FILES.is_dir(), reason="no shared/data/cifar10 beside this repository"
)

needs_mnist_files = pytest.mark.skipif(not MNIST_FILES.is_dir(), reason="no shared/data/mnist beside this repository")

needs_faces = pytest.mark.skipif(not FACES.is_file(), reason="no shared/data/celeba beside this repository")


def cifar10_test_images(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Images, uint8 (rows * columns, 3, 32, 32), and labels of the first rows and columns of the sheet of 100 x 100."""
    sheet = np.asarray(Image.open(CIFAR10_FILES / "test.webp").convert("RGB"))[: rows * 32, : columns * 32]
    tiles = sheet.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    labels = np.load(CIFAR10_FILES / "labels.npz")["test"].reshape(100, 100)[:rows, :columns].reshape(-1)
    return torch.from_numpy(tiles.copy()), torch.from_numpy(labels)
