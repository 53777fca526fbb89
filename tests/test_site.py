"""The documentation site: examples and notebooks run on toys; the API has every public name."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import matplotlib as mpl
import pytest
import torch
import yaml
from test_readme import ROOT, blocks_of, run_blocks
from toy_models import LEVELS, Weights, any_size_model, stand_in_model

import mmdgs
from mmdgs.models import Model
from mmdgs.noise import LevelTable
from mmdgs.randomness import seeded

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "use" / "notebooks").glob("*.ipynb"))
ELSEWHERE = {"commands", "interop", "judge", "ocm", "bring-your-model", "sample"}
"""Pages whose examples run in other tests: of the README, interop, diagnose and OCM training."""
HERE = {
    "calibrate", "covariance", "covariances", "extend", "gotchas", "index", "instruments",
    "restore", "posterior", "probes",
}  # fmt: skip
LEVEL = mmdgs.NoiseLevel(0.5)


def linear_model(shape: tuple[int, ...], levels: Sequence[mmdgs.NoiseLevel]) -> Model:
    """A denoiser of independent pixels: a pixel's variance is sigma^2 times its gain."""
    gain = gain_of(shape)
    return Model(lambda x_t, level: gain * x_t, Weights(), levels, shape, (0.0, 1.0), "a test")


def gain_of(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.9 ** torch.arange(float(math.prod(shape))).reshape(shape)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny networks in place of the models that ship, and a folder of the test for files."""
    models = {}
    for name, size in (("celeba", 64), ("cifar10", 32)):
        models[name] = partial(stand_in_model, tmp_path / name, (3, size, size))
    models["photo"] = _photographs
    digits = partial(linear_model, (1, 28, 28), (LEVEL,))
    monkeypatch.setattr(mmdgs, "load", lambda name: models.get(name, digits)(), raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _photographs() -> Model:
    """A tiny model of photographs of any size, with a flat spectrum."""
    model = any_size_model()
    table = LevelTable.of({level: torch.ones(3, 16, 16) for level in model.levels})
    model.inherited_fit = {"spectral": table}.get
    return model


def test_every_page_with_an_example_is_run_by_a_test() -> None:
    assert {page.stem for page in DOCS.rglob("*.md") if blocks_of(page)} == ELSEWHERE | HERE


def test_the_first_five_minutes(toys: Path) -> None:
    scope = run_blocks(DOCS / "index.md")
    assert scope["q"].mean.shape == scope["digits"].shape == (4, 1, 28, 28)
    assert ((scope["high"] - scope["low"]) > 0).all()
    assert (toys / "first.png").stat().st_size > 1000


def test_covariances_by_name(toys: Path) -> None:
    scope = run_blocks(DOCS / "use/covariance.md")
    assert scope["std"].shape == scope["one"].shape == (1, 3, 32, 32)
    assert scope["draws"].shape == (2, 1, 3, 32, 32)
    assert run_blocks(DOCS / "results/covariances.md")["draw"].shape == (1, 3, 32, 32)


def test_gotchas(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(DOCS / "use/gotchas.md")
    assert "give the noisiest first" in capsys.readouterr().out


def test_the_skeletons_of_an_estimator_a_sampler_and_an_operator() -> None:
    """The page asserts exact answers itself; its classes are what the library takes for such."""
    scope = run_blocks(DOCS / "use/extend.md")
    assert isinstance(scope["DifferenceMoments"](scope["mixture"].denoiser()), mmdgs.Moments)
    assert isinstance(scope["kernel"], mmdgs.samplers.Kernel)
    assert scope["run"].cost.forwards == 200
    by_autograd = mmdgs.operators.linear(scope["operator"]._forward, (3, 4, 4))
    assert torch.equal(scope["operator"].adjoint(scope["y"]), by_autograd.adjoint(scope["y"]))
    with pytest.raises(ValueError, match="images of 3 channels, got shape"):
        scope["Bayer"]((1, 4, 4))


def test_restoration(toys: Path) -> None:
    scope = run_blocks(DOCS / "use/restore.md")
    assert scope["restored"].draws.shape == (2, 2, 3, 32, 32)
    assert scope["isotropic"].draws.shape == (2, 2, 1, 16, 16, 16)
    assert scope["linear"].info["linearisation"].shape == (2, 1)


def test_images_of_instruments(toys: Path) -> None:
    restored = run_blocks(DOCS / "use/instruments.md")["restored"]
    assert restored.draws.shape == (2, 1, 3, 64, 64)
    assert restored.noise.shape == (1, 3, 64, 64)  # at every pixel its own


def test_the_posterior_of_an_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of independent pixels: components in the region are its pixels of largest variance."""
    monkeypatch.chdir(tmp_path)
    noisy, model = torch.rand(3, 32, 32, generator=seeded(0)), linear_model((3, 32, 32), LEVELS)
    monkeypatch.setattr(mmdgs, "load", lambda name: model, raising=False)
    scope = run_blocks(DOCS / "use/posterior.md", x_t=noisy[None], noisy=noisy)
    inside = gain_of((3, 32, 32))[:, 8:24, 8:24].flatten()
    expected = 0.3**2 * inside.sort(descending=True).values[:5]
    assert torch.allclose(scope["principal"].variances[0], expected, rtol=1e-3)
    assert scope["principal"].directions.shape == (1, 5, 3, 32, 32)
    assert scope["higher"].skewness.shape == (1, 5)
    assert scope["seen"].mean.shape == (3, 32, 32)


def test_probes_and_calibration(toys: Path) -> None:
    paper = run_blocks(DOCS / "results/probes.md")["paper"]
    assert isinstance(paper.design, mmdgs.moments.probes.Rademacher)
    mixture, g = mmdgs.data.mog_density(), seeded(0)
    data, moments = mixture.sample(200, generator=g), mmdgs.DiagonalMoments(mixture.denoiser())
    names = {"model": SimpleNamespace(posterior=lambda covariance: moments), "levels": [LEVEL]}
    names |= {"mmdgs": mmdgs, "data": data, "x_t": data, "level": LEVEL, "generator": g}
    scope = run_blocks(DOCS / "use/calibrate.md", **names)
    assert ((scope["low"] <= data) & (data <= scope["high"])).shape == data.shape


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_with_small_outputs(
    notebook: Path, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert "site-packages" not in json.dumps(outputs)  # no warning with a path of a machine
    assert notebook.stat().st_size < 300_000
    monkeypatch.chdir(ROOT)  # where docs/images is
    scope: dict[str, object] = {}
    with mpl.rc_context({"backend": "agg"}):
        for cell in cells:
            source = "".join(cell["source"]).replace("plt.show()", "plt.close()")
            exec(compile(source.replace("steps=15", "steps=3"), notebook.name, "exec"), scope)
    assert torch.isfinite(scope["seen" if notebook.stem == "digit" else "found"].draws).all()


def names_of(module: ModuleType) -> list[str]:
    """The functions and classes that a public module offers."""
    if module is mmdgs.interop:
        return module.__all__  # of libraries that need not be installed
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    values = {name: getattr(module, name) for name in getattr(module, "__all__", own)}
    kinds = (type, FunctionType)
    return [n for n, value in values.items() if isinstance(value, kinds) and not n.startswith("_")]


def test_every_public_name_is_in_the_api() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "use" / "api").glob("*.md"))
    shown = re.findall(r"^::: (mmdgs\.\S+)$", text, flags=re.MULTILINE)
    assert len(shown) == len(set(shown))
    missing = {*mmdgs.__all__} - {"__version__"} - {name.rpartition(".")[2] for name in shown}
    for module in re.findall(r"^## `mmdgs\.(\w+)`$", text, flags=re.MULTILINE):
        for name in names_of(importlib.import_module(f"mmdgs.{module}")):
            if not {f"mmdgs.{module}.{name}", f"mmdgs.{name}"} & {*shown}:
                missing.add(f"{module}.{name}")
    assert not missing


def test_nothing_of_the_site_comes_from_the_network() -> None:
    """Fonts are the reader's own, and no other script or style is named."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not [file for file in settings["extra_css"] if not (DOCS / file).is_file()]
    assert "extra_javascript" not in settings


def test_every_figure_of_the_guides_is_drawn_by_the_script() -> None:
    script = (DOCS / "figures.py").read_text()
    drawn = re.search(r"FIGURES: .*?^}", script, flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r'^    "(\w+)":', drawn[0], flags=re.MULTILINE)
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    shown = dict(re.findall(r"images/idea_(\w+)\.(png|jpg)", text))
    assert sorted(names) == sorted(shown)
    files = [DOCS / "images" / f"idea_{name}.{ending}" for name, ending in shown.items()]
    assert all(file.stat().st_size < 250_000 for file in files)
