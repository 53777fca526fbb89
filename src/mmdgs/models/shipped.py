"""Models that ship: their names, the folders of their weights, and what their files say."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.files import read_json, read_text
from mmdgs.models.config import MEAN_STD, ModelConfig
from mmdgs.models.levels import in_words
from mmdgs.models.weights import (
    CARD,
    CONFIG,
    ISOTROPIC,
    MEGABYTE,
    SHARDS,
    SPECTRAL,
    WEIGHTS,
    counts_in,
)
from mmdgs.reading import parse_yaml

SHIPPED = {
    "mnist": "mnist-energy",
    "mnist-energy": "mnist-energy",
    "mnist-kl": "mnist-kl",
    "mnist-classifier": "mnist-classifier",
    "cifar10": "cifar10",
    "cifar10-classifier": "cifar10-classifier",
    "cifar10-score": "cifar10-score",
    "celeba": "celeba",
    "photo": "photo",
}
"""Names of models, and their folders in weights/ of the source tree."""
PHOTO = "photo"
"""The model of photographs of any size, which commands on images take where none is named."""
PACKAGED = ("celeba", "cifar10", "mnist-energy", "photo")
"""The folders that are in the distribution mmdgs-models; experiments alone use the others."""
FENCE = "---"


def shipped_roots() -> list[Path]:
    """Where models that ship may be: weights/ of the source tree, the package mmdgs_models."""
    package = find_spec("mmdgs_models")
    installed = package.submodule_search_locations or [] if package else []
    return [Path(__file__).resolve().parents[3] / "weights", *map(Path, installed)]


def shipped_folders() -> dict[str, Path]:
    """The folder of each model that is here, by its name."""
    folders = {
        name: root / folder
        for root in reversed(shipped_roots())
        for name, folder in SHIPPED.items()
        if (root / folder / CONFIG).is_file()
    }
    return dict(sorted(folders.items()))


def shipped_folder(name: str) -> Path | None:
    """The folder of a model that ships; None for other names."""
    if name not in SHIPPED:
        return None
    folder = shipped_folders().get(name)
    if folder is None:
        packaged = SHIPPED[name] in PACKAGED
        source = "pip install mmdgs-models" if packaged else "use a clone of the source tree"
        raise UsageError(f"the weights of {name!r} are not installed: {source}")
    return folder


@dataclass(frozen=True)
class ShippedModel:
    """A model that ships: its names (all load it), its folder, and what its files say."""

    names: tuple[str, ...]
    folder: Path
    config: ModelConfig
    parameters: int
    bytes: int  # of the weights
    fitted: tuple[str, ...]  # covariances that need data and come fitted
    licence: str

    @property
    def card(self) -> Path:
        return self.folder / CARD

    def to_json(self) -> dict[str, Any]:
        """What `mmdgs models --json` prints."""
        return {
            "names": list(self.names),
            "folder": str(self.folder),
            "output": self.config.param,
            "shape": list(self.config.shape),
            "parameters": self.parameters,
            "megabytes": self.bytes / MEGABYTE,
            "data": self.config.trained_on,
            "levels": in_words(self.config.levels),
            "fitted_covariances": list(self.fitted),
            "licence": self.licence,
        }


def shipped_models() -> list[ShippedModel]:
    """The models that are installed, by name."""
    folders = shipped_folders()
    return [
        _described(folder, tuple(name for name in folders if folders[name] == folder))
        for folder in dict.fromkeys(folders.values())
    ]


def _described(folder: Path, names: tuple[str, ...]) -> ShippedModel:
    config = ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG)
    files = [*folder.glob(WEIGHTS), *folder.glob(SHARDS)]
    fits = {kind for kind in (ISOTROPIC, SPECTRAL) if (folder / f"{kind}.safetensors").is_file()}
    fits |= {ISOTROPIC} if config.isotropic_variance is not None else set()
    fits |= {"learned"} if config.param == MEAN_STD else set()
    parameters = sum(sum(counts_in(file).values()) for file in files)
    size = sum(file.stat().st_size for file in files)
    licence = licence_of(folder)
    return ShippedModel(names, folder, config, parameters, size, tuple(sorted(fits)), licence)


def licence_of(folder: Path) -> str:
    """The licence in a card's front matter: license, or license_name where that is "other"."""
    lines = read_text(folder / CARD).splitlines() if (folder / CARD).is_file() else []
    keys = None
    if lines and lines[0].strip() == FENCE and FENCE in lines[1:]:
        keys = parse_yaml("\n".join(lines[1 : lines.index(FENCE, 1)]), folder / CARD)
    keys = keys if isinstance(keys, dict) else {}
    kind = str(keys.get("license") or "not said")
    return str(keys.get("license_name") or kind) if kind == "other" else kind
