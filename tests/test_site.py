"""The documentation site: its examples run, its notebooks run on toys, and every public name has a place in the API."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import pytest
import torch
import yaml
from test_readme import ROOT, blocks_of, run_blocks
from toy_models import LEVELS, Weights, stand_in_model

import mmdgs
from mmdgs.models import Model

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
ELSEWHERE = {"commands", "interop", "judging", "ocm", "pretrained", "samplers"}
"""Pages whose examples run in other tests: of the README, interop, diagnose and OCM training."""
HERE = {"calibration", "covariance", "covariances", "extend", "gotchas", "index", "inverse", "posterior", "probes"}
LEVEL = mmdgs.NoiseLevel(0.5)


def linear_model(shape: tuple[int, ...], levels: Sequence[mmdgs.NoiseLevel]) -> tuple[Model, torch.Tensor]:
    """A denoiser of independent pixels, and its gains: the variance of a pixel is sigma^2 times its gain."""
    gain = 0.9 ** torch.arange(float(math.prod(shape))).reshape(shape)
    return Model(lambda x_t, level: gain * x_t, Weights(), levels, shape, (0.0, 1.0), "a test"), gain


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names are those of tiny networks in place of the models that ship, and files go to a folder of the test."""
    made = {"mnist-energy": lambda: linear_model((1, 28, 28), (LEVEL,))[0]}
    for name, size in (("celeba", 64), ("cifar10", 32)):
        made[name] = lambda folder=tmp_path / name, size=size: stand_in_model(folder, (3, size, size))
    monkeypatch.setattr(mmdgs, "load", lambda name: made[name](), raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_page_with_an_example_is_run_by_a_test() -> None:
    assert {page.stem for page in DOCS.glob("*.md") if blocks_of(page)} == ELSEWHERE | HERE


def test_the_first_five_minutes(toys: Path) -> None:
    scope = run_blocks(DOCS / "index.md")
    assert scope["q"].mean.shape == scope["digits"].shape == (4, 1, 28, 28)
    assert ((scope["high"] - scope["low"]) > 0).all()
    assert (toys / "first.png").stat().st_size > 1000


def test_covariances_by_name(toys: Path) -> None:
    scope = run_blocks(DOCS / "covariance.md")
    assert scope["std"].shape == scope["one"].shape == (1, 3, 32, 32)
    assert scope["draws"].shape == (2, 1, 3, 32, 32)
    assert run_blocks(DOCS / "covariances.md")["draw"].shape == (1, 3, 32, 32)


def test_gotchas(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(DOCS / "gotchas.md")
    assert "give the noisiest first" in capsys.readouterr().out


def test_the_skeletons_of_an_estimator_a_sampler_and_an_operator() -> None:
    """The page asserts exact answers itself; and its classes are what the library takes for such."""
    scope = run_blocks(DOCS / "extend.md")
    assert isinstance(scope["DifferenceMoments"](scope["mixture"].denoiser()), mmdgs.Moments)
    assert isinstance(scope["kernel"], mmdgs.samplers.Kernel)
    assert scope["run"].cost.forwards == 200
    by_autograd = mmdgs.operators.linear(scope["operator"]._forward, (3, 4, 4))
    assert torch.equal(scope["operator"].adjoint(scope["y"]), by_autograd.adjoint(scope["y"]))
    with pytest.raises(ValueError, match="images of 3 channels, got shape"):
        scope["Bayer"]((1, 4, 4))


def test_restoration(toys: Path) -> None:
    assert run_blocks(DOCS / "inverse.md")["found"].draws.shape == (2, 2, 3, 32, 32)


def test_the_posterior_of_an_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a denoiser of independent pixels: the components in the region are its pixels of largest variance."""
    monkeypatch.chdir(tmp_path)
    noisy = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    model, gain = linear_model((3, 32, 32), LEVELS)
    monkeypatch.setattr(mmdgs, "load", lambda name: model, raising=False)
    scope = run_blocks(DOCS / "posterior.md", x_t=noisy[None], noisy=noisy)
    expected = 0.3**2 * gain[:, 8:24, 8:24].flatten().sort(descending=True).values[:5]
    assert torch.allclose(scope["found"].variances[0], expected, rtol=1e-3)
    assert scope["found"].directions.shape == (1, 5, 3, 32, 32)
    assert scope["higher"].skewness.shape == (1, 5)
    assert scope["seen"].mean.shape == (3, 32, 32)


def test_probes_and_calibration(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmdgs, "from_pretrained", lambda name: linear_model((1, 28, 28), (LEVEL,))[0], raising=False)
    assert isinstance(run_blocks(DOCS / "probes.md")["paper"].design, mmdgs.Rademacher)
    mixture = mmdgs.data.mog_density()
    g = torch.Generator().manual_seed(0)
    data = mixture.sample(200, generator=g)

    class Given:
        posterior = staticmethod(lambda covariance: mmdgs.DiagonalMoments(mixture.denoiser(), probes=None))

    scope = run_blocks(
        DOCS / "calibration.md", mmdgs=mmdgs, model=Given, data=data, levels=[LEVEL], x_t=data, level=LEVEL, generator=g
    )
    inside = (scope["low"] <= data) & (data <= scope["high"])
    assert inside.shape == data.shape


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_with_small_outputs(notebook: Path, toys: Path, monkeypatch) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert "site-packages" not in json.dumps(outputs)  # no warning with a path of somebody's machine
    assert notebook.stat().st_size < 300_000
    monkeypatch.chdir(ROOT)  # where docs/images is
    scope: dict[str, object] = {}
    with mpl.rc_context({"backend": "agg"}):
        for cell in cells:
            source = "".join(cell["source"]).replace("plt.show()", "plt.close()").replace("steps=15", "steps=3")
            exec(compile(source, notebook.name, "exec"), scope)
    assert torch.isfinite(scope["seen"].draws if notebook.stem == "digit" else scope["found"].draws).all()


def homes() -> dict[str, str]:
    """The public names of mmdgs, with the module that each comes from."""
    stub = ast.parse((Path(mmdgs.__file__).with_suffix(".pyi")).read_text())
    return {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def names_of(module: ModuleType) -> list[str]:
    """The functions and classes that a public module offers."""
    if module is mmdgs.interop:
        return module.__all__  # of libraries that need not be installed
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return [name for name, value in found.items() if inspect.isfunction(value) or inspect.isclass(value)]


def test_every_public_name_is_in_the_api() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: (mmdgs\.\S+)$", text, flags=re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = homes()
    modules = [name for name, home in public.items() if home == "mmdgs"]
    missing = [
        name
        for name, home in public.items()
        if home != "mmdgs" and name != "__version__" and not {f"mmdgs.{name}", f"{home}.{name}"} & set(shown)
    ]
    for module in modules:
        for name in names_of(importlib.import_module(f"mmdgs.{module}")):
            known = {f"mmdgs.{module}.{name}"} | ({f"mmdgs.{name}"} if name in public else set())
            missing += [] if known & set(shown) else [f"{module}.{name}"]
    assert missing == []


def test_nothing_of_the_site_comes_from_the_network() -> None:
    """Fonts are the reader's own; no other script or style is named (the build checks the pages themselves)."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not [file for file in settings["extra_css"] if not (DOCS / file).is_file()]
    assert "extra_javascript" not in settings


def test_every_figure_of_the_idea_is_drawn_by_the_script() -> None:
    drawn = re.search(r"FIGURES: .*?^}", (DOCS / "figures.py").read_text(), flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r'^    "(\w+)":', drawn[0], flags=re.MULTILINE)
    shown = re.findall(r"images/idea_(\w+)\.png", (DOCS / "idea.md").read_text())
    assert sorted(names) == sorted(shown)
    assert all((DOCS / "images" / f"idea_{name}.png").stat().st_size < 250_000 for name in names)
