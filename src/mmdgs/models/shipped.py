"""Models that come with mmdgs: their names, and the folders of their weights."""

from __future__ import annotations

from pathlib import Path

from mmdgs.errors import UsageError

SHIPPED = {
    "mnist": "mnist-energy",
    "mnist-energy": "mnist-energy",
    "mnist-kl": "mnist-kl",
    "mnist-classifier": "mnist-classifier",
    "cifar10": "cifar10",
    "cifar10-classifier": "cifar10-classifier",
    "cifar10-score": "cifar10-score",
    "celeba": "celeba",
}
"""Names of models that may come with mmdgs, and their folders under weights/."""
RECIPES = {"cifar10": "cifar10.yaml", "cifar10-score": "cifar10-score.yaml", "celeba": "celeba.yaml"}
"""What trains those that may be absent, in recipes/ of the source tree."""


def shipped_roots() -> list[Path]:
    """Where models that ship may be: inside the package, or beside `src` in a source tree."""
    here = Path(__file__).resolve().parents[1]
    return [here / "weights", here.parents[1] / "weights"]


def shipped_names() -> list[str]:
    """The names of the models that came with this installation."""
    found = [name for name, folder in SHIPPED.items() if any(_holds_model(root / folder) for root in shipped_roots())]
    return sorted(found)


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def shipped_folder(name: str) -> Path | None:
    """The folder of a model that comes with the package."""
    if name not in SHIPPED or Path(name).is_dir():
        return None
    for root in shipped_roots():
        if _holds_model(root / SHIPPED[name]):
            return root / SHIPPED[name]
    said = f"the weights of {name!r} did not come with this installation"
    if name not in RECIPES:
        raise UsageError(f"{said}; look for them in the source tree")
    raise UsageError(
        f"{said}, or are not trained yet; look for weights/{SHIPPED[name]} in the source tree, or train them on a GPU: "
        f"mmdgs train --config recipes/{RECIPES[name]} --out runs/{name}, and then give that folder"
    )
