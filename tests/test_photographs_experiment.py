"""Photographs: numbers against direct computation, the columns of the records, missing data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed
from nets import lively, random_images, save_pictures
from sizes import unpaint
from toy_models import any_size_model

from experiments import Context, Workspace, photo_restoration, photographs
from experiments.ffdnet import FFDNet, load_ffdnet
from experiments.grid import Cell
from experiments.photographs import FFDNET, GAIN, MAPS, ORACLE, OURS, PHOTO, RANDOM
from mmdgs import save
from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

SIZES = ((20, 17), (17, 20), (20, 17), (20, 17))
"""Height and width of each photograph."""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Four small photographs, a tiny model and weights of FFDNet."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    unpaint(monkeypatch)
    images = (random_images(1, (3, *size), seed=i)[0] for i, size in enumerate(SIZES))
    folder = save_pictures(tmp_path / "photos", images, map(str, range(len(SIZES))))
    save(any_size_model(), tmp_path / "model")
    torch.save(lively(FFDNet()).state_dict(), tmp_path / "ffdnet.pth")
    tiny = replace(photographs.QUICK, images=4, side=None, sigmas=(25, 50), timed=16)
    return Context(
        Workspace(tmp_path / "out"), torch.device("cpu"), quick=True, data_dir=str(folder),
        settings=tiny, model=str(tmp_path / "model"), ffdnet=str(tmp_path / "ffdnet.pth"),
    )  # fmt: skip


def test_the_error_left_of_a_known_map() -> None:
    """Errors 1 to 10: without the three largest the mean is 4 of 5.5; a wrong map leaves 7."""
    squares = torch.arange(1.0, 11.0).reshape(2, 5)
    assert photographs.error_left(squares, squares, (0.0, 0.3)) == pytest.approx([1, 4 / 5.5])
    assert photographs.error_left(-squares, squares, (0.3,)) == pytest.approx([7 / 5.5])


def test_the_smoothed_gradient_of_a_ramp() -> None:
    ramp = torch.arange(12.0).expand(1, 3, 9, 12)
    torch.testing.assert_close(photographs.smoothed_gradient(2 * ramp), torch.full((1, 9, 12), 4.0))


def test_ffdnet_takes_odd_sizes_and_any_alpha(tmp_path: Path) -> None:
    """Convolutions at half resolution: an odd side is continued, and only the ratio counts."""
    torch.save(lively(FFDNet()).state_dict(), tmp_path / "f.pth")
    network = load_ffdnet(tmp_path / "f.pth", torch.device("cpu"))
    x = torch.rand(2, 3, 7, 10, generator=seeded(0))
    mean = network(x, NoiseLevel(0.1))
    wider = torch.cat([x, x[:, :, -1:]], 2)
    torch.testing.assert_close(mean, network(wider, NoiseLevel(0.1))[:, :, :7])
    torch.testing.assert_close(mean, network(0.5 * x, NoiseLevel(0.05, alpha=0.5)))
    (tmp_path / "f.pth").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="is refused, and nothing in it was run"):
        load_ffdnet(tmp_path / "f.pth", torch.device("cpu"))


def by_cell(cells: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(cell["row"], cell["sigma"]): cell for cell in cells}


def test_both_networks_are_judged_on_the_same_noise(prepared: Context) -> None:
    records, report = performed("photographs", prepared)
    quality = by_cell(records["psnr"])
    assert set(quality) == {(row, sigma) for row in (PHOTO, FFDNET) for sigma in (25, 50)}
    own, theirs = quality[PHOTO, 25], quality[FFDNET, 25]
    gains = [a - b for a, b in zip(own["psnr"], theirs["psnr"], strict=True)]
    assert own["gain"] == pytest.approx(gains)
    posteriors = by_cell(records["posteriors"])
    # Nothing is fitted for this model: no spectral and no isotropic row.
    assert set(posteriors) == {(row, 25) for row in ("diagonal, as it comes", "diagonal")}
    assert all(len(cell["z_variance"]) == 2 for cell in posteriors.values())
    maps = by_cell(records["maps"])
    assert set(maps) == {(row, 25) for row in MAPS}
    oracle, chance = maps[ORACLE, 25], maps[RANDOM, 25]
    assert oracle["correlation"] == pytest.approx([1.0, 1.0])
    for key in ("left_10", "left_30", "left_50"):
        assert all(a <= b for a, b in zip(oracle[key], maps[OURS, 25][key], strict=True))
        assert chance[key] == pytest.approx([1.0, 1.0], abs=0.3)
    assert set(records["seconds"]) == {PHOTO, FFDNET}
    assert [figure.name for figure in report.sections[0].figures] == [
        "photo_gain", "photo_sparsification", "photo_posterior",
    ]  # fmt: skip


def test_numbers_are_those_of_a_direct_computation(prepared: Context) -> None:
    first, second = photographs.photographs(prepared.data_dir, 4, None)
    assert ([*first], [*second]) == (["0", "1"], ["2", "3"])
    model = any_size_model()
    work = photographs._Work(prepared, model, None, first | second, tuple(second))
    noisy = {}
    for names, _, x_t in work.noisy(work.judging, 25):
        noisy |= dict(zip(names, x_t, strict=True))
    level, values = NoiseLevel(25 / 255), work.quality(Cell(PHOTO, 25, None, (0,))).values
    assert GAIN.key not in values
    for i, name in ((2, "2"), (3, "3")):
        error = model(noisy[name][None], level).clamp(0, 1) - second[name]
        expected = -10 * error.double().square().mean().log10().item()
        assert values["psnr"][i] == pytest.approx(expected, abs=1e-4)
        noise = noisy[name] - second[name]
        assert noise.std().item() == pytest.approx(25 / 255, rel=0.1)
    held = work.calibration(Cell(OURS, 25, None, (0,))).values
    for i, (_, clean, _, q) in enumerate(work.posteriors(OURS, 25)):
        z = (clean - q.mean).square() / q.cov.diagonal()
        assert held["z_variance"][i] == pytest.approx(z.mean().item())


@pytest.mark.parametrize("name", ["photographs", "photo-restoration"])
def test_without_photographs_or_with_small_ones_it_says_so(prepared: Context, name: str) -> None:
    with pytest.raises(UsageError, match="--data-dir"):
        performed(name, replace(prepared, data_dir=None))
    photographs.photographs(prepared.data_dir, 4, 17)
    with pytest.raises(UsageError, match="17 x 20 pixels, less than 18 a side"):
        photographs.photographs(prepared.data_dir, 4, 18)


def test_restorations_are_scored_by_image(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On images that the search of a rival's setting has not seen; cells by task and row."""
    monkeypatch.setattr(photo_restoration, "QUICK_SIDE", 16)
    rows = {"isotropic": photo_restoration.Ours("diagonal", 3)}
    monkeypatch.setattr(photo_restoration, "ROWS", rows)
    tiny = replace(photo_restoration.QUICK, rows=tuple(rows))
    context = replace(prepared, case=("SR x2", "70%"), settings=tiny)
    records, _ = performed("photo-restoration", context)
    cells = {cell["task"]: cell for cell in records["restored"]}
    assert set(cells) == {
        f"{name}, noise {noise}" for name in ("SR x2", "70% missing") for noise in (0.02, 0.05)
    }
    for cell in cells.values():
        assert len(cell["crps"]) == 2
        assert all(map(math.isfinite, cell["crps"]))
        assert cell["evaluations"] == 3 * (1 + 2 * 3)
