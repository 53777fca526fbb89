"""What ships: every model that came with mmdgs, by what its files say (config.json, the weights, README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdgs.files import read_json, read_text
from mmdgs.models.config import MEAN_STD, ModelConfig
from mmdgs.models.fits import FIT_FILES, ISOTROPIC
from mmdgs.models.levels import in_words
from mmdgs.models.model import CARD, CONFIG
from mmdgs.models.shipped import SHIPPED, shipped_names, shipped_roots
from mmdgs.models.weights import MEGABYTE, SHARDS, WEIGHTS, counts_in
from mmdgs.reading import parse_yaml

FENCE = "---"


@dataclass(frozen=True)
class ShippedModel:
    """A model that came with mmdgs: its names (all load it), its folder, and what its files say."""

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
    """The models that came with this installation, by name."""
    found: dict[Path, list[str]] = {}
    for name in shipped_names():
        folder = next(root / SHIPPED[name] for root in shipped_roots() if (root / SHIPPED[name] / CONFIG).is_file())
        found.setdefault(folder, []).append(name)
    return [_described(folder, tuple(names)) for folder, names in found.items()]


def _described(folder: Path, names: tuple[str, ...]) -> ShippedModel:
    config = ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG)
    files = [*folder.glob(WEIGHTS), *folder.glob(SHARDS)]
    size = sum(file.stat().st_size for file in files)
    return ShippedModel(
        names,
        folder,
        config,
        sum(sum(counts_in(file).values()) for file in files),
        size,
        _fitted(folder, config),
        licence_of(folder),
    )


def _fitted(folder: Path, config: ModelConfig) -> tuple[str, ...]:
    found = {Path(name).stem for name in FIT_FILES if (folder / name).is_file()}
    found |= {ISOTROPIC} if config.isotropic_variance is not None else set()
    found |= {"learned"} if config.param == MEAN_STD else set()
    return tuple(sorted(found))


def licence_of(folder: Path) -> str:
    """The licence that a model's card names, as the hub's cards do: license, or license_name where that is "other"."""
    card = folder / CARD
    said = _front_matter(card) if card.is_file() else {}
    kind = str(said.get("license") or "not said")
    return str(said.get("license_name") or kind) if kind == "other" else kind


def _front_matter(card: Path) -> Mapping[str, Any]:
    """The keys at the top of a card, between two lines of dashes."""
    first, *lines = read_text(card).splitlines() or [""]
    if first.strip() != FENCE or FENCE not in lines:
        return {}
    found = parse_yaml("\n".join(lines[: lines.index(FENCE)]), card)
    return found if isinstance(found, dict) else {}
