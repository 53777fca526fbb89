"""The direction of imports: a module imports only from the layers above its own, or from its own package.

And what it imports from outside is declared: as a dependency, or in an extra that users install.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmdgs
from mmdgs.cli.app import LAB_EXTRA

ROOT = Path(mmdgs.__file__).parent

LAYERS = [
    ["errors", "interrupts", "lazy", "options", "tables", "version"],
    ["reading"],
    ["files", "cost", "derivatives", "memory", "runtime"],
    ["randomness", "pickled"],
    ["noise", "compiled"],
    ["schedules"],
    ["operators"],
    ["linalg"],
    ["posterior"],
    ["networks"],
    ["denoisers"],
    ["jacobians", "targets", "guidance"],
    ["moments"],
    ["samplers"],
    ["losses"],
    ["data"],
    ["metrics"],
    ["diagnostics"],
    ["models"],
    ["generation", "evaluation"],
    ["interop"],
    ["training"],
    ["lab", "studio"],
    ["cli"],
    ["__init__", "__main__"],
]
"""From the ground up. A new module is placed here, with a thought for what it may stand on."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(file: Path) -> str:
    """The name in LAYERS that a file belongs to: its module, or the package it is in."""
    return file.relative_to(ROOT).with_suffix("").parts[0]


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
            # `from mmdgs import x` reads the module x if there is one, and else what __init__ offers.
            yield rest[0] if rest and rest[0] in modules() else "__init__"


def modules() -> set[str]:
    return {layer_of(file) for file in FILES}


def violations(layer: str, source: str) -> list[str]:
    return [name for name in imported(source) if name != layer and RANK.get(name, len(LAYERS)) >= RANK[layer]]


def test_every_module_has_a_place() -> None:
    assert modules() <= RANK.keys(), f"place these in LAYERS: {sorted(modules() - RANK.keys())}"


def test_the_map_of_the_design_has_every_module_in_the_order_of_the_layers() -> None:
    text = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    lines = text[text.index("    errors, interrupts") :].split("\n\n", 1)[0].splitlines()
    named = [name.rstrip("/") for line in lines if line[4] != " " for name in line[4:34].strip().split(", ")]
    assert sorted(named) == sorted(RANK.keys() - {"__init__", "__main__"})
    assert [RANK[name] for name in named] == sorted(RANK[name] for name in named)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_imports_go_up_only(file: Path) -> None:
    layer = layer_of(file)
    if layer not in RANK:
        pytest.fail(f"{layer} has no place in LAYERS")
    assert violations(layer, file.read_text()) == []


@pytest.mark.parametrize(
    ("layer", "source", "expected"),
    [
        ("noise", "from mmdgs.randomness import randn", []),
        ("noise", "from mmdgs.posterior import Gaussian", ["posterior"]),
        ("noise", "import mmdgs.posterior", ["posterior"]),
        ("noise", "from mmdgs import posterior, errors", ["posterior"]),
        ("noise", "import mmdgs", ["__init__"]),
        ("noise", "from mmdgs import NoiseLevel", ["__init__"]),
        ("noise", "def f():\n    from mmdgs.samplers.gibbs import Gibbs", ["samplers"]),
        ("noise", "from .errors import UsageError", ["a relative import"]),
        ("cost", "from mmdgs.runtime import threads", ["runtime"]),
        ("samplers", "from mmdgs.samplers.kernel import State", []),
        ("moments", "from torch import Tensor\nimport math", []),
    ],
)
def test_the_check_itself(layer: str, source: str, expected: list[str]) -> None:
    assert violations(layer, source) == expected


def test_only_its_commands_import_the_lab() -> None:
    outside = [file for file in FILES if layer_of(file) != "lab" and "lab" in imported(file.read_text())]
    assert {str(file.relative_to(ROOT)) for file in outside} == {
        "cli/bench.py",
        "cli/diagnose.py",
        "cli/judge.py",
        "cli/reproduce.py",
    }


def test_the_command_line_starts_without_the_labs_extra() -> None:
    code = "import sys, mmdgs.cli; print([name for name in ('matplotlib', 'jinja2', 'sklearn') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


PROVIDED = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
"""The distributions of modules that have another name."""
DEVELOPERS = ("test", "docs", "studio-test")
WITH_OTHERS = {"fastapi", "starlette", "uvicorn", "markupsafe"}
"""They come with gradio, and with jinja2."""


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(wanted: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", one)[0] for one in wanted}

    always = names(project["dependencies"])
    ours = {name: names(wanted) for name, wanted in extras.items() if name not in DEVELOPERS}
    packages = {name.partition(".")[0] for file in FILES for name in imports(file.read_text())}
    outside = packages - sys.stdlib_module_names - {"mmdgs"}
    missing = {PROVIDED.get(one, one) for one in outside} - always.union(*ours.values()) - WITH_OTHERS
    assert not missing
    # The message for a module that is missing names the extra that has it.
    assert {PROVIDED.get(one, one) for one in LAB_EXTRA} == ours["lab"]
