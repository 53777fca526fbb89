"""The direction of imports: a module imports only from the layers above its own, or from its own
package.

And what it imports from outside is declared: as a dependency, or in an extra that users install.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import mmdgs
from mmdgs.cli.app import EXTRAS

ROOT = Path(mmdgs.__file__).parent

LAYERS = [
    ["errors", "interrupts", "tables", "version"],
    ["lazy", "options", "reading"],
    ["files", "cost", "derivatives", "memory", "runtime"],
    ["randomness", "pickled", "folders"],
    ["noise", "compiled"],
    ["schedules"],
    ["operators"],
    ["sensors"],
    ["linalg"],
    ["posterior"],
    ["networks"],
    ["denoisers"],
    ["jacobians", "levy", "targets", "guidance"],
    ["moments"],
    ["samplers"],
    ["covariances", "identity", "losses"],
    ["data"],
    ["metrics"],
    ["diagnostics"],
    ["models"],
    ["sampling", "evaluation"],
    ["restoration"],
    ["uncertainty"],
    ["interop"],
    ["training"],
    ["workspace", "bench", "studio"],
    ["report"],
    ["demo"],
    ["cli"],
    ["__init__", "__main__"],
]
"""From the ground up. A new module is placed here, with a thought for what it may stand on."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(file: Path) -> str:
    """The name in LAYERS that a file belongs to: its module, or the package it is in."""
    return file.relative_to(ROOT).with_suffix("").parts[0]


MODULES = {layer_of(file) for file in FILES}
RELATIVE = "a relative import"


def imports(source: str) -> Iterator[str]:
    """The modules a source imports, with their packages, wherever in the file it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield RELATIVE
        elif isinstance(node, ast.ImportFrom) and node.module == "mmdgs":
            yield from (f"mmdgs.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def imported(source: str) -> Iterator[str]:
    """The layers a source imports from."""
    for name in imports(source):
        package, *rest = name.split(".")
        if name == RELATIVE:
            yield name
        elif package == "mmdgs":
            # `from mmdgs import x` reads the module x if there is one, and else what __init__
            # offers.
            yield rest[0] if rest and rest[0] in MODULES else "__init__"


def violations(layer: str, source: str) -> list[str]:
    return [
        name
        for name in imported(source)
        if name != layer and RANK.get(name, len(LAYERS)) >= RANK[layer]
    ]


def test_every_module_has_a_place() -> None:
    assert set(RANK) >= MODULES, f"place these in LAYERS: {sorted(MODULES - RANK.keys())}"


def test_imports_go_up_only() -> None:
    wrong = {
        str(file.relative_to(ROOT)): names
        for file in FILES
        if (names := violations(layer_of(file), file.read_text()))
    }
    assert wrong == {}


PROVIDED = {"PIL": "pillow", "yaml": "pyyaml"}
"""The distributions of modules that have another name."""
DEVELOPERS = ("test", "docs", "studio-test")
WITH_OTHERS = {"fastapi", "starlette", "uvicorn", "markupsafe"}
"""They come with gradio, and with jinja2."""


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}

    always = names(project["dependencies"])
    ours = {extra: names(extras[extra]) for extra in extras if extra not in DEVELOPERS}
    packages = {name.partition(".")[0] for file in FILES for name in imports(file.read_text())}
    outside = packages - sys.stdlib_module_names - {"mmdgs"}
    distributions = {PROVIDED.get(name, name) for name in outside}
    assert not distributions - always.union(*ours.values()) - WITH_OTHERS
    # The message for a module that is missing names the extra that has it.
    assert {PROVIDED.get(name, name) for name in EXTRAS["report"]} == ours["report"]
