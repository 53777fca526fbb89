"""The comparison of probes: its Jacobians, its errors by known matrices, and runs with and without
a model.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from image_experiments import performed, pictures_of, resumed
from nets import random_images, tiny_model
from sizes import unpaint
from toy_models import many_level_model

import mmdgs
from experiments import Context, Workspace, probes
from experiments.probes import DESIGNS, YARDSTICK, ProbeSettings, error_of, jacobian, needed
from mmdgs.data import ImageSet, image_set
from mmdgs.errors import UsageError
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

TINY = ProbeSettings(
    counts=(2, 10), draws=3, digits=2, ratios=(0.7, 3.0), sampling_steps=2,
    map_images=2, map_probes=(1, 10), lattice_probes=(3,),
)  # fmt: skip
LEVEL = NoiseLevel(sigma=0.7)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Tiny models and random images in the place of those that ship and of their data."""
    mmdgs.save(tiny_model(), tmp_path / "digits")
    mmdgs.save(many_level_model((3, 4, 4)), tmp_path / "model")
    monkeypatch.setattr(probes, "DIGITS", str(tmp_path / "digits"))
    mmdgs.save(tiny_model("score", (3, 4, 4), sigma=0.3), tmp_path / "one")
    monkeypatch.setattr(probes, "ONE_LEVEL", str(tmp_path / "one"))

    def images(name: str, split: str, **options: object) -> ImageSet:
        shape = mmdgs.load(str(tmp_path / "digits")).shape if name == "mnist" else (3, 4, 4)
        return image_set(random_images(8, shape), name)

    monkeypatch.setattr(probes, "load_images", images)
    unpaint(monkeypatch)
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), settings=TINY)


@pytest.mark.parametrize("rows", [8, 7])
def test_the_jacobian_is_the_denoisers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probes, "ROWS_AT_ONCE", {"cpu": rows, "cuda": rows}
    )  # 7: the last rows are fewer
    model = many_level_model((2, 8, 8))
    x_t = torch.randn(1, 2, 8, 8, generator=seeded(0))
    exact = mean_and_jacobian(model, x_t, LEVEL)[1][0]
    found = jacobian(model, x_t, LEVEL, "")
    assert torch.allclose(found, exact, atol=1e-6)
    assert not torch.allclose(found, exact.mT, atol=1e-3)


def test_errors_are_those_of_the_estimator() -> None:
    """None for a diagonal matrix; for signs at every number the mean square is |J - diag J|_F^2 / S
    (Bekas et al.).
    """
    shape = (1, 4, 4)
    for design in DESIGNS.values():  # the filter finds no noise, and rounds
        assert error_of(torch.diag(torch.arange(1.0, 17.0)), shape, design, 2, 400, 0) < 1e-6
    matrix = torch.randn(16, 16, generator=seeded(0)) + 3 * torch.eye(16)
    off = matrix - torch.diag(matrix.diagonal())
    assert isinstance(DESIGNS[YARDSTICK], Rademacher)
    for count in (2, 8):
        # The mean of a norm lies a little below the root of the mean square.
        expected = (off.norm() / matrix.diagonal().norm()).item() / math.sqrt(count)
        assert (
            0.85 * expected
            < error_of(matrix, shape, DESIGNS[YARDSTICK], count, 400, 0)
            < 1.02 * expected
        )


def test_products_needed_lie_on_the_power_law_between_counts() -> None:
    counts = (1, 2, 10, 50)
    curve = [3 / math.sqrt(count) for count in counts]
    assert needed(counts, curve, 3 / math.sqrt(5)) == pytest.approx(5)
    assert needed(counts, curve, 3 / math.sqrt(10)) == pytest.approx(10)
    assert needed(counts, curve, 4.0) == 1
    assert needed(counts, curve, 0.1) == math.inf


def test_it_measures_both_models_and_tries_new_designs_without_the_network(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = resumed(prepared, model=str(tmp_path / "model"))
    records, report = performed("probes", context)
    places = [
        "MNIST energy, sigma/alpha 0.5",
        "diffusion model, sigma/alpha 0.7",
        "diffusion model, sigma/alpha 3",
    ]
    keys = [(one["where"], one["row"], one["products"]) for one in records["probes"]]
    assert keys == [(where, row, n) for where in places for row in DESIGNS for n in TINY.counts]
    assert all(
        len(one["error"]) == (2 if one["where"] == places[0] else 1) for one in records["probes"]
    )
    assert pictures_of(context) == {"probes", "cifar10_maps"}
    products, *errors = report.sections[0].tables
    assert [row[1:] for row in products.rows if row[0] == YARDSTICK] == [["10"] * 3]
    assert [len(table.rows) for table in errors] == [len(DESIGNS)] * 3

    errors = records["maps"]["errors"]
    assert set(errors) == {"Rademacher, 1", "Rademacher, 10", "lattice, 3", probes.ONE}

    monkeypatch.setattr(probes, "jacobian", None)  # the network is not asked again
    monkeypatch.setattr(probes, "generate", None)
    again = resumed(context)
    assert probes.run(again).records["probes"] == records["probes"]
    monkeypatch.setattr(probes, "DESIGNS", {**DESIGNS, "new": Rademacher()})
    more = probes.run(again).records["probes"]
    assert [one for one in more if one["row"] != "new"] == records["probes"]
    new, same = ([one["error"] for one in more if one["row"] == row] for row in ("new", YARDSTICK))
    assert new == same  # the same design and the same signs


def test_a_model_of_one_level_is_refused_by_name(prepared: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="digits"):
        probes.run(resumed(prepared, quick=True, model=str(tmp_path / "digits")))
