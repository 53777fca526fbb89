"""What numbers were made with: versions, the machine, and how its arithmetic was done. Every record holds it."""

from __future__ import annotations

import platform
from typing import Any

import numpy
import torch

from mmdgs.version import __version__


def device_name(device: torch.device) -> str:
    """A GPU by its name, and else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device, *, precision: str | None = None) -> dict[str, Any]:
    """Versions, platform, device and threads as JSON-ready data; the precision of networks where it is known."""
    found = {
        "mmdgs": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
    return found if precision is None else found | {"precision": precision}
