"""Reference files beside the repository, in ../shared: tests that need them are skipped where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"
NCSNV2 = SHARED / "reference" / "ncsnv2"
CIFAR10_DDPM = SHARED / "models" / "cifar10_ddpm_unet2d"

needs_ncsnv2 = pytest.mark.skipif(not NCSNV2.is_dir(), reason="no shared/reference/ncsnv2 beside this repository")
needs_cifar10_ddpm = pytest.mark.skipif(
    not CIFAR10_DDPM.is_dir(), reason="no shared/models/cifar10_ddpm_unet2d beside this repository"
)
