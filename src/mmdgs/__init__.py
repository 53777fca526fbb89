"""mmdgs: from a denoiser to the denoising posterior p(x | noisy x), and from that posterior to samplers.

Zhang, Hawkins-Hooker, Paige and Barber, "Moment Matching Denoising Gibbs Sampling", NeurIPS 2023.

The public names are in __init__.pyi. Each is imported when it is first used, so that `mmdgs --help` needs no torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from mmdgs.version import __version__ as __version__

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmdgs' has no attribute {name!r}")
    home = _HOMES[name]
    if home == "mmdgs":
        return import_module(f"mmdgs.{name}")
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
