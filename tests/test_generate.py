"""Many samples: written as they come, whatever the batches and processes; killed, refused, and gone
on with.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import tiny_model
from PIL import Image
from torch import Tensor
from toy_models import LEVELS, SHAPE, exact, many_level_model, of_levels
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, samplers
from mmdgs.covariances import Diagonal
from mmdgs.data import load_samples, to_uint8
from mmdgs.errors import UsageError
from mmdgs.files import locked, output_folder
from mmdgs.folders import require_same
from mmdgs.identity import plan_record
from mmdgs.models import Model
from mmdgs.moments.probes import Lattice
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams, randn_like, seeded, uniforms
from mmdgs.samplers import DDIM, Heun, Plan, State
from mmdgs.sampling import Generated, SamplerSettings, generate, make_plan
from mmdgs.targets import GaussianMixture

run = CliRunner().invoke
COUNT, SIZE = 11, 3


def plan_of(model: Model, **settings: Any) -> Plan:
    return make_plan(SamplerSettings("gibbs", covariance=Diagonal(2), sweeps=1, **settings), model)


def drawn(model: Model | None = None, count: int = COUNT, **options: Any) -> Generated:
    model = model or exact()
    plan = options.pop("plan", None) or plan_of(model)
    return generate(model, plan, count, progress=None, **{"batch_size": SIZE, "seed": 4, **options})


def images_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("[0-9]*.png"))}


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "samples.json").read_text())


def pixels(x: Tensor) -> np.ndarray:
    """Samples as an .npz holds them: uint8 (n, height, width, channels)."""
    return to_uint8(x).permute(0, 2, 3, 1).numpy()


def same(out: Path, other: Path) -> bool:
    """Whether two runs wrote the same samples, byte for byte."""
    if out.is_dir():
        return images_in(out) == images_in(other)
    return out.read_bytes() == other.read_bytes()


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def said(result: Any) -> str:
    return " ".join(result.output.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of five levels, saved."""
    return mmdgs.save(many_level_model(), tmp_path / "model")


# --- what comes out
# ----------------------------------------------------------------------------------------------


def test_samples_are_the_plan_run_from_noise_around_the_middle_of_the_interval() -> None:
    model = exact()
    plan = plan_of(model)
    start = plan.noise(SHAPE, 5, generator=Streams(4, 5, purpose="start"))
    by_hand = samplers.run(plan, start, seed=4, progress=None)
    found = drawn(model, 5, batch_size=5)
    assert torch.equal(found.x, (by_hand.x + 1) / 2)  # [-1, 1] as [0, 1]
    assert found.cost == by_hand.cost
    assert found.seconds > 0
    assert found.path is None
    asked: list[tuple[int, int]] = []

    def elsewhere(chains: int, first: int) -> Tensor:
        asked.append((chains, first))
        return start[first : first + chains] + 3

    assert not torch.allclose(drawn(model, 5, start=elsewhere).x, found.x, atol=1e-2)
    assert asked == [(3, 0), (2, 3)]
    shifted = Model(model, model.network, LEVELS, SHAPE, (2.0, 6.0))
    by_hand = samplers.run(plan, start + 4, seed=4, progress=None)
    assert torch.allclose(drawn(shifted, 5, plan=plan).x, (by_hand.x - 2) / 4, atol=1e-6)


def test_a_method_stands_in_place_of_its_plan(tmp_path: Path) -> None:
    method = SamplerSettings("gibbs", covariance=Diagonal(2), sweeps=1)
    assert torch.equal(drawn(plan=method).x, drawn().x)
    drawn(plan=method, out=tmp_path / "out")
    record = record_in(tmp_path / "out")
    assert record["settings"]["sampler"]["covariance"]["probes"] == 2


class Draws:
    """A kernel whose state is what it draws."""

    def step(self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator):
        return State(randn_like(state.x, generator)), {}


def test_seeds_and_purposes_share_no_number() -> None:
    model, numbers = exact(), []
    plan = Plan.along(Draws(), [(LEVELS[0], LEVELS[0])] * 2)
    for seed in (0, 1, 2, 2**63):
        states = drawn(model, 5, plan=plan, keep=[0, 1, 2], seed=seed).states
        start, *steps = 2 * states - 1  # as they were, in [-1, 1]
        numbers += [start / LEVELS[0].sigma, *steps]
    ordered = torch.stack(numbers).flatten().sort().values
    # 720 numbers that lie within 1e-6 of another by chance: once in ten tries, so a few are
    # allowed.
    assert (ordered.diff() < 1e-6).sum() < 5


def one_level(
    shape: tuple[int, ...] = SHAPE, interval: tuple[float, float] = (-1.0, 1.0)
) -> tuple[Model, Plan]:
    """A model of one level that shrinks x_t by half, and three sweeps of it."""
    level = NoiseLevel(sigma=0.5)
    model = Model(lambda x_t, level: 0.5 * x_t, exact().network, (level,), shape, interval)
    moments = mmdgs.DiagonalMoments(model, probes=None)
    return model, samplers.single_level_plan(moments, level, steps=3)


def test_states_on_the_way_are_those_of_the_gibbs_sampler() -> None:
    model, plan = one_level()
    found = drawn(model, 5, plan=plan, keep=[0, 1, 3])
    assert found.states.shape == (3, 5, *SHAPE)
    assert torch.equal(found.states[-1], found.x)
    streams, x = Streams(4, 5, purpose="steps"), 2 * found.states[0] - 1
    for step in (1, 2, 3):
        x_t = mmdgs.add_noise(x, model.levels[0], generator=streams)
        x = mmdgs.DiagonalMoments(model, probes=None)(x_t, model.levels[0]).sample(
            generator=streams
        )
        if step != 2:
            torch.testing.assert_close(2 * found.states[min(step, 2)] - 1, x)
    part = drawn(model, 2, plan=plan, keep=[0, 1, 3], first=3)  # the last two of the five
    torch.testing.assert_close(part.states, found.states[:, 3:])
    assert drawn(model, 5, plan=plan).states is None


def test_where_chains_start() -> None:
    """Images of one level: uniform in the interval. Points, and models of many levels: noise of the
    first level.
    """
    model, plan = one_level((1, 6, 6), (2.0, 6.0))
    uniform = drawn(model, 50, plan=plan, keep=[0], batch_size=20).states[0]
    expected = uniforms((50, 1, 6, 6), torch.empty(0), Streams(4, 50, purpose="start"))
    torch.testing.assert_close(uniform, expected)
    points, plan = one_level((2,), (2.0, 6.0))
    normal = 4 * drawn(points, 3_000, plan=plan, keep=[0], batch_size=1_000).states[0] - 2
    assert normal.mean().item() == pytest.approx(0, abs=0.04)
    assert normal.std().item() == pytest.approx(0.5, abs=0.03)
    start = torch.rand(5, 1, 6, 6, generator=seeded(0))
    given = drawn(model, 5, plan=plan, keep=[0], start=model.scaled(start)).states[0]
    torch.testing.assert_close(given, start)
    with pytest.raises(UsageError, match="start must have shape"):
        drawn(model, 5, plan=plan, start=start[:4])


def test_a_callback_sees_every_step_of_every_batch() -> None:
    model, plan = one_level()
    seen = torch.zeros(3, 5, *SHAPE)

    def note(step: int, state: State, info: samplers.Info, first: int) -> None:
        seen[step, first : first + len(state.x)] = state.x

    found = drawn(model, 5, plan=plan, keep=[1, 2, 3], callback=note)
    assert torch.equal((seen + 1) / 2, found.states)


def test_repairs_are_averaged_over_steps_and_chains() -> None:
    """Every chain counts alike, whatever the batch it is in: 2, 2 and 1 here, with another fraction
    in each.
    """
    level = NoiseLevel(sigma=0.5)

    def bent(x_t: torch.Tensor, level: NoiseLevel) -> torch.Tensor:
        sign = x_t.detach().sign()  # half of the slopes, roughly, are negative
        return 0.5 * sign * x_t

    model = Model(bent, exact().network, (level,), SHAPE, (-1.0, 1.0))
    moments = mmdgs.DiagonalMoments(model, probes=None, floor=1e-6)
    plan = samplers.single_level_plan(moments, level, steps=3)
    seen = torch.zeros(3, 5)

    def note(step: int, state: State, info: samplers.Info, first: int) -> None:
        seen[step, first : first + len(state.x)] = info["repaired"]

    found = drawn(model, 5, plan=plan, batch_size=2, callback=note)
    by_batch = torch.stack([part.mean() for part in seen.split(2, 1)])
    assert (by_batch.mean() - seen.mean()).abs() > 0.01  # an average of the batches' is another
    assert found.repaired == pytest.approx(seen.mean().item(), abs=1e-6)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    whole = drawn(batch_size=None)
    for size in (1, 4, 100):
        torch.testing.assert_close(drawn(batch_size=size).x, whole.x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drawn(count=3).x, whole.x[:3], rtol=1e-5, atol=1e-5)
    assert (drawn(seed=5).x - whole.x).abs().max() > 0.05
    assert (whole.x[0] - whole.x[1]).abs().max() > 0.05


def test_precision_is_the_networks_and_states_stay_in_float32(tmp_path: Path) -> None:
    model = many_level_model((3, 8, 8))
    plan = make_plan(SamplerSettings("ddim"), model)
    full, low = (drawn(model, 3, plan=plan, precision=name).x for name in ("float32", "bf16"))
    assert low.dtype == torch.float32
    assert not torch.equal(full, low)
    assert torch.allclose(full, low, atol=0.1 * full.std().item())
    drawn(model, 3, plan=plan, precision="bf16", out=tmp_path / "low")
    assert record_in(tmp_path / "low")["settings"]["precision"] == "bf16"
    with pytest.raises(UsageError, match="'half'"):
        drawn(model, 3, plan=plan, precision="half")


def test_images_are_written_as_png_files_with_a_record(tmp_path: Path) -> None:
    out = tmp_path / "a [folder]"
    written = drawn(out=out)
    assert (written.x, written.path) == (None, out)
    assert list(images_in(out)) == [f"{i:06}.png" for i in range(COUNT)]
    assert sorted(path.name for path in out.iterdir()) == [".lock", *images_in(out), "samples.json"]
    for i, expected in enumerate(pixels(drawn().x)):
        with Image.open(out / f"{i:06}.png") as image:
            np.testing.assert_array_equal(np.asarray(image), expected)
    record, steps = record_in(out), len(LEVELS) - 1
    assert (record["finished"], record["source"], record["device"]) == (True, "a test", "cpu")
    assert record["versions"] == {"mmdgs": mmdgs.__version__, "torch": torch.__version__}
    known = {"count": COUNT, "seed": 4, "model": exact().digest}
    assert record["settings"] | known == record["settings"]
    cost = record["cost"]
    assert cost["forwards"] == written.cost.forwards == steps + 1
    assert cost["products"] == written.cost.products == 2 * steps
    assert cost["evaluations"] == steps + 1 + 2 * 2 * steps
    assert cost["seconds"] == pytest.approx(written.seconds)
    assert cost["seconds_a_sample"] == pytest.approx(written.seconds / COUNT)


def test_an_array_is_put_together_from_its_parts(tmp_path: Path) -> None:
    """Images as public evaluators read them: uint8 `arr_0` (n, height, width, channels)."""
    out = tmp_path / "x [1].npz"
    drawn(out=out)
    with np.load(out) as archive:
        assert archive.files == ["arr_0"]
        assert archive["arr_0"].dtype == np.uint8
        np.testing.assert_array_equal(archive["arr_0"], pixels(drawn().x))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x [1].npz", "x [1].samples.json"]
    drawn(out=tmp_path / "again.npz")
    assert same(tmp_path / "again.npz", out)
    with zipfile.ZipFile(out) as archive:  # the time would make other bytes
        assert archive.getinfo("arr_0.npy").date_time[:2] == (1980, 1)


def test_an_array_of_floating_point_numbers_is_not_clipped(tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    drawn(out=out, floating=True)
    x = drawn().x.numpy()
    assert x.min() < 0, "the test needs values outside of [0, 1]"
    with np.load(out) as archive:
        assert archive.files == ["x"]
        assert archive["x"].dtype == np.float32
        np.testing.assert_array_equal(archive["x"], x)
    with pytest.raises(UsageError, match="floating was True, now None"):
        drawn(out=out, resume=True)
    for elsewhere in (None, tmp_path / "folder"):
        with pytest.raises(UsageError, match="--float"):
            drawn(out=elsewhere, floating=True)


def test_an_evaluation_reads_the_same_images_from_both(tmp_path: Path) -> None:
    drawn(out=tmp_path / "floats.npz", floating=True)
    for name in ("folder", "x.npz"):
        drawn(out=tmp_path / name)
    for name in ("folder", "x.npz", "floats.npz"):
        assert torch.equal(load_samples(tmp_path / name).images, to_uint8(drawn().x)), name


def test_an_array_of_more_parts_than_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    few = len(list(descriptors.iterdir())) + 20 if descriptors.exists() else 128
    model = exact()
    plan = make_plan(SamplerSettings("ddim", steps=2), model)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        drawn(model, 60, plan=plan, batch_size=1, out=tmp_path / "x.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    off = np.load(tmp_path / "x.npz")["arr_0"].astype(int) - pixels(drawn(model, 60, plan=plan).x)
    assert abs(off).max() <= 1


# --- going on
# --------------------------------------------------------------------------------------------------


class Stopping:
    """Counts the rows a model is asked for, and stops the run after so many calls."""

    def __init__(self, calls: int | None = None) -> None:
        self.calls, self.rows = calls, 0

    def __call__(self, x_t: Tensor) -> None:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls = None if self.calls is None else self.calls - 1
        self.rows += len(x_t)

    @property
    def pretrained(self) -> Model:
        return exact(before=self)


CALLS = len(LEVELS)
"""Calls of the denoiser for each batch of `plan_of`."""


@pytest.mark.parametrize("name", ["folder", "x.npz"])
def test_a_run_that_was_stopped_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole, out = tmp_path / f"whole-{name}", tmp_path / name
    drawn(out=whole)
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS + 3).pretrained, out=out)
    going_on = Stopping()
    drawn(going_on.pretrained, out=out, resume=True)
    assert going_on.rows == (COUNT - 2 * SIZE) * CALLS  # two batches are not made again
    assert same(out, whole)
    assert hidden(out if name == "folder" else tmp_path) == [".lock"] * (name == "folder")
    # Once more: there is nothing left to do, and the record says what it cost.
    again = drawn(Stopping(0).pretrained, out=out, resume=True)
    assert again.cost == drawn().cost
    assert again.seconds > 0


def test_half_written_files_do_not_count(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    drawn(out=whole)
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS).pretrained, out=out)
    (out / "000001.png").rename(out / ".000001.png.mmdgs-tmp")  # as a kill within a batch leaves it
    (out / ".parts" / ".000003.json.mmdgs-tmp").write_bytes(b"half")
    drawn(out=out, resume=True)
    assert same(out, whole)
    assert hidden(out) == [".lock"]


def test_a_deleted_image_is_made_again(tmp_path: Path) -> None:
    """With its batch, and no other one."""
    out = tmp_path / "out"
    drawn(out=out)
    before = images_in(out)
    (out / "000004.png").unlink()
    going_on = Stopping()
    drawn(going_on.pretrained, out=out, resume=True)
    assert going_on.rows == SIZE * CALLS
    assert images_in(out) == before


def test_parts_without_a_record_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.npz", tmp_path / "x.npz"
    drawn(out=whole)
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS).pretrained, out=out, seed=99)
    (tmp_path / "x.samples.json").unlink()
    drawn(out=out)
    assert out.read_bytes() == whole.read_bytes()


def as_npz(part: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, np.load(part))
    part.write_bytes(stream.getvalue())


def cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-7])


def with_huge_number(part: Path) -> None:
    shutil.copy(part, part.with_name("000000-999999999999.npy"))


@pytest.mark.parametrize("damage", [as_npz, cut, with_huge_number])
def test_a_damaged_part_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.npz", tmp_path / "x.npz"
    drawn(out=whole)
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS).pretrained, out=out)
    damage(min((tmp_path / ".x.npz.parts").glob("*.npy")))
    drawn(out=out, resume=True)
    assert out.read_bytes() == whole.read_bytes()


def test_going_on_with_another_batch_size(tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS).pretrained, out=out)
    drawn(out=out, resume=True, batch_size=4)
    assert abs(np.load(out)["arr_0"].astype(int) - pixels(drawn().x)).max() <= 1


def test_resuming_with_other_settings_names_them(tmp_path: Path) -> None:
    model, other = exact(), exact()
    torch.nn.init.zeros_(other.network.weight)
    method = SamplerSettings("gibbs", covariance=Diagonal(2), sweeps=1)
    run_before = {"plan": method, "out": tmp_path / "out"}
    drawn(model, **run_before)
    before = images_in(tmp_path / "out")
    for changes, message in (
        ({"seed": 5}, "seed was 4, now 5"),
        ({"count": 12}, "count was 11, now 12"),
        (
            {"plan": replace(method, covariance=Diagonal(3))},
            "sampler.covariance.probes was 2, now 3",
        ),
        ({"plan": plan_of(model, steps=4)}, "plan.levels was"),
        ({"model": other}, "model was"),
    ):
        with pytest.raises(UsageError, match=f"other settings .*{message}"):
            drawn(**run_before | changes, resume=True)
    assert images_in(tmp_path / "out") == before


def fitted(model: Model, variance: float) -> mmdgs.IsotropicMoments:
    return mmdgs.IsotropicMoments(model, dict.fromkeys(LEVELS, 0.1) | {LEVELS[2]: variance})


D = mmdgs.DiagonalMoments
OTHERS = {
    "eta": [Plan.down(DDIM(exact(), eta), LEVELS) for eta in (0.0, 1.0)],
    "rate": [samplers.langevin_plan(exact(), LEVELS, rate=rate) for rate in (0.1, 0.2)],
    "churn": [Plan.down(Heun(exact(), churn), LEVELS) for churn in (0.0, 0.1)],
    "floor": [samplers.gibbs_plan(D(exact(), floor=floor), LEVELS) for floor in (None, 0.01)],
    "probes": [samplers.gibbs_plan(D(exact(), probes=probes), LEVELS) for probes in (2, 3)],
    "design": [
        samplers.gibbs_plan(D(exact(), design=Lattice(smooth=smooth)), LEVELS)
        for smooth in (True, False)
    ],
    "moments": [samplers.gibbs_plan(kind(exact()), LEVELS) for kind in (D, mmdgs.KrylovMoments)],
    "variances": [samplers.ancestral_plan(fitted(exact(), v), LEVELS) for v in (0.2, 0.3)],
    "levels": [Plan.down(DDIM(exact()), LEVELS[first:]) for first in (0, 1)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_plan_has_another_record(name: str) -> None:
    before, now = (json.loads(json.dumps(plan_record(plan))) for plan in OTHERS[name])
    with pytest.raises(UsageError, match=rf"other settings \(.*\b{name}\b.* was .*, now "):
        require_same(Path("out"), before, now)
    require_same(Path("out"), before, before)


def scaled_by(scale: float) -> Any:
    return lambda x_t, level: scale * x_t


OTHER_INPUTS: dict[str, list[dict[str, Any]]] = {
    "start": [{"start": torch.full((2, *SHAPE), value)} for value in (0.0, 1.0)],
    "no start": [{"start": torch.zeros(2, *SHAPE)}, {}],
    "function": [{"model": of_levels(LEVELS, scaled_by(scale))} for scale in (0.5, 0.6)],
    "levels": [{"model": exact()}, {"model": exact(LEVELS[:-1])}],
    "interval": [{"model": of_levels(LEVELS, interval=(low, 1.0))} for low in (-1.0, 0.0)],
    "shape": [{"model": of_levels(LEVELS, shape=shape)} for shape in (SHAPE, (3, 4, 1))],
}


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_other_inputs_do_not_go_on(name: str, tmp_path: Path) -> None:
    before, now = OTHER_INPUTS[name]
    plan = Plan.down(DDIM(exact()), LEVELS)
    out = tmp_path / "out"
    drawn(count=2, plan=plan, out=out, **before)
    first = images_in(out)
    (out / "000001.png").unlink()
    with pytest.raises(UsageError, match=" now "):
        drawn(count=2, plan=plan, out=out, resume=True, **now)
    drawn(count=2, plan=plan, out=out, resume=True, **before)
    assert images_in(out) == first


def record_of(denoiser: Any, levels: Any = LEVELS) -> str:
    return json.dumps(plan_record(Plan.down(DDIM(denoiser), levels)))


FACTOR = torch.tensor(2.0)


def by_global(x_t: Tensor, level: NoiseLevel) -> Tensor:
    return FACTOR * x_t


class Holder:
    """An object of anybody's: what is public counts, what it found out by itself does not."""

    def __init__(self, scale: float) -> None:
        self.scale, self._calls = scale, 0

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        self._calls += 1
        return self.scale * x_t


MAKERS = {
    "closure": scaled_by,
    "object": Holder,
    "partial": lambda scale: functools.partial(Holder.__call__, Holder(scale)),
    "method": lambda scale: Holder(scale).__call__,
    "tensor": lambda scale: scaled_by(torch.tensor([1.0, scale])),
    "mixture": lambda scale: GaussianMixture([1.0], torch.zeros(1, 2), scale).denoiser(),
    "network": lambda scale: mmdgs.clean_denoiser(MLP(2, 2, width=4, seed=int(2 * scale))),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_record_covers_functions_objects_and_networks(make: Callable[[float], Any]) -> None:
    used = make(2.0)
    used(torch.zeros(1, 2), LEVELS[0])
    assert record_of(used) == record_of(make(2.0))
    assert record_of(used) != record_of(make(2.5))


def test_a_record_covers_the_code_of_functions_and_what_they_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A denoiser of a notebook is a function that names a network."""
    half, third = (lambda x_t, level: x_t / 2), (lambda x_t, level: x_t / 3)
    half.__qualname__ = third.__qualname__ = "denoiser"
    assert record_of(half) != record_of(third)
    network = MLP(2, 2, width=4, seed=0)
    assert record_of(mmdgs.clean_denoiser(network)) != record_of(mmdgs.noise_denoiser(network))
    before = record_of(by_global)
    assert record_of(by_global) == before
    monkeypatch.setitem(globals(), "FACTOR", torch.tensor(3.0))
    assert record_of(by_global) != before


@dataclass(frozen=True)
class Fitted(Draws):
    """A kernel with one of each: a set, a mapping, a tensor, a function and a number."""

    levels: frozenset[NoiseLevel]
    table: dict[NoiseLevel, float]
    spectrum: Tensor
    denoiser: Any
    interval: tuple[float, float] = (0.0, 1.0)


def test_a_record_is_the_same_in_every_process() -> None:
    """These digests were written by another process, which hashed strings in another way."""
    levels = [NoiseLevel(sigma=float(sigma)) for sigma in (8, 4, 2, 1)]
    half = functools.partial(torch.mul, torch.tensor(0.5))
    kernel = Fitted(frozenset(levels), dict.fromkeys(levels, 0.5), torch.tensor([0.5, 0.25]), half)
    record = plan_record(Plan.along(kernel, list(pairwise(levels))))
    assert len(record["Fitted"].pop("code")) == 16  # another in another version of Python
    assert record == {
        "levels": "5a5cb2e4ded8d41a",
        "Fitted": {
            "kind": "test_generate.Fitted",
            "levels": "37bacd7a2a0cf98c",
            "table": "83da63963e2a736d",
            "spectrum": "11d56c283761cdbe",
            "denoiser": "aa6e00d4dd1b942d",
            "interval": [0.0, 1.0],
        },
    }


def test_a_batch_that_does_not_fit_is_halved(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hungry:
        def step(
            self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
        ):
            if len(state.x) > 2 and level == LEVELS[1]:
                raise torch.OutOfMemoryError("too many")
            return kernel.step(state, level, following, generator=generator)

    class Bar(list):
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        update = list.append

    model, bar = exact(), Bar()
    plan = plan_of(model)
    kernel = plan.steps[0].kernel
    steps = [step._replace(kernel=Hungry()) for step in plan.steps[:-1]]
    monkeypatch.setattr("mmdgs.runtime.progress_bar", lambda *_, **__: bar)
    with caplog.at_level(logging.WARNING, "mmdgs"):
        halved = drawn(model, 9, plan=Plan(plan.start, (*steps, plan.steps[-1])), batch_size=9)
    # Steps that were made in vain are taken back from the progress.
    assert min(bar) < 0
    assert sum(bar) == 9 * len(plan.steps)
    torch.testing.assert_close(halved.x, drawn(model, 9).x, rtol=1e-5, atol=1e-5)
    lines = [record.message for record in caplog.records if "fit in memory" in record.message]
    assert ["going on with 4" in line for line in lines] == [True, False]
    assert "going on with 2" in lines[1]


def test_where_not_one_sample_fits_the_refusal_says_what_to_do() -> None:
    def hungry(x_t: Tensor, level: NoiseLevel) -> Tensor:
        raise torch.OutOfMemoryError("too many")

    model = Model(hungry, exact().network, LEVELS, SHAPE, (-1.0, 1.0))
    with pytest.raises(UsageError, match=r"--probes 1.*--device cpu"):
        drawn(model, plan=plan_of(model), batch_size=4)


# --- refusals
# --------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    for name in ("folder", "x.npz"):
        out = tmp_path / name
        drawn(out=out)
        with pytest.raises(UsageError, match=r"--overwrite .*, --resume"):
            drawn(out=out)
        drawn(out=out, overwrite=True, seed=9, count=2)
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    drawn(out=tmp_path / "folder", overwrite=True)
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"foreign is not empty.*use --overwrite"):
            drawn(out=foreign, resume=resume)


def test_two_runs_into_one_place(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UsageError, match="another run is writing into"):
        drawn(out=tmp_path)
    parts = tmp_path / ".x.npz.parts"
    parts.mkdir()
    with locked(parts), pytest.raises(UsageError, match="another run is writing into"):
        drawn(out=tmp_path / "x.npz")
    drawn(out=tmp_path / "x.npz")


def test_requests_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    points = Model(exact(), exact().network, LEVELS, (12,), (-1.0, 1.0))
    for options, message in (
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"keep": [1], "out": tmp_path / "kept"}, "cannot be combined with out"),
        ({"out": tmp_path / "file"}, "is a file; give a folder, or a name that ends in .npz"),
        ({"out": tmp_path / "no" / "x.npz"}, "there is no folder"),
        ({"out": tmp_path / "points", "model": points}, "points of shape (12,), not images"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            drawn(**options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert drawn(points, out=tmp_path / "points.npz").count == COUNT


# --- the command line
# --------------------------------------------------------------------------------------------


def words(model: Path, out: Path, *more: str) -> list[str]:
    common = "--sampler gibbs --sweeps 2 --probes 1 -n 24 --batch-size 4 --seed 3 --device cpu"
    return ["sample", str(model), *common.split(), "--out", str(out), *more]


@pytest.mark.parametrize(
    ("many", "more", "expected"),
    [
        (True, [], "heun"),
        (True, ["--churn", "0.1"], "heun"),
        (True, ["--probes", "1"], "gibbs-down"),
        (True, ["--sweeps", "1"], "gibbs-down"),
        (True, ["--covariance", "lattice"], "gibbs-down"),
        (False, ["--probes", "1"], "gibbs"),
        (False, [], "gibbs"),
    ],
)
def test_the_sampler_where_none_is_named(
    many: bool, more: list[str], expected: str, folder: Path, tmp_path: Path
) -> None:
    model = folder if many else mmdgs.save(tiny_model(), tmp_path / "one")
    chosen = ["--steps", "2", *more, "-n", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    result = run(cli.app, ["sample", str(model), *chosen])
    assert result.exit_code == 0, result.output
    record = record_in(tmp_path / "out")
    assert record["settings"]["sampler"]["sampler"] == expected


def test_the_command_draws_what_the_library_draws(folder: Path, tmp_path: Path) -> None:
    result = run(cli.app, words(folder, tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert re.search(
        r"24 images: 9 forwards and 8 Jacobian products each, [\d.]+ seconds", said(result)
    )
    model = mmdgs.load(str(folder))
    plan = make_plan(SamplerSettings("gibbs", covariance=Diagonal(1), sweeps=2), model)
    generate(model, plan, 24, out=tmp_path / "library", seed=3, batch_size=4, progress=None)
    assert images_in(tmp_path / "out") == images_in(tmp_path / "library")
    record = record_in(tmp_path / "out")
    assert record["settings"]["sampler"]["sampler"] == "gibbs"
    assert record["settings"]["sampler"]["levels"]["count"] == 5
    grid = run(cli.app, words(folder, tmp_path / "grid.png"))
    assert grid.exit_code == 0, grid.output
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (3 * (5 * 10 + 2), 3 * (5 * 10 + 2))


def test_one_picture_has_a_record_and_goes_on(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.png", tmp_path / "x.png"
    drawn(out=whole)
    record = json.loads((tmp_path / "whole.png.samples.json").read_text())
    assert (record["finished"], record["settings"]["seed"]) == (True, 4)
    with pytest.raises(UsageError, match="exists"):
        drawn(out=whole)
    with pytest.raises(KeyboardInterrupt):
        drawn(Stopping(2 * CALLS).pretrained, out=out)
    assert not out.exists()
    going_on = Stopping()
    drawn(going_on.pretrained, out=out, resume=True)
    assert going_on.rows == (COUNT - 2 * SIZE) * CALLS
    assert same(out, whole)
    names = {f"{name}.png{end}" for name in ("whole", "x") for end in ("", ".samples.json")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_disk_that_is_full_in_the_middle_of_an_array_is_told_by_the_systems_reason(
    tmp_path: Path,
) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 16, before[1])
    )  # numpy's error has no reason then
    try:
        with pytest.raises(OSError, match="File too large"):
            drawn(exact(), 4096, out=tmp_path / "x.npz", batch_size=4096, floating=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_misuse_of_the_command(folder: Path, tmp_path: Path) -> None:
    for more, named in (
        ("--data mnist", "(--data)"),
        ("--fit-images 3", "--fit-images is for --data"),
        ("--size 9", "size"),
        ("--raw", "ema=False is for"),
        (f"--out {tmp_path / 'x.html'}", "x.html"),
    ):
        result = run(cli.app, words(folder, tmp_path / "out", *more.split()))
        assert result.exit_code == 2, result.output
        assert named in said(result)
        assert not (tmp_path / "out").exists()


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", *more]


@pytest.mark.slow
def test_two_processes_draw_the_images_of_one(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    launch = command(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mmdgs"
    )
    found = subprocess.run([*launch, *words(folder, two)], capture_output=True, timeout=200)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout.decode().count("samples:") == 1
    assert run(cli.app, words(folder, one)).exit_code == 0
    assert one.read_bytes() == two.read_bytes()
    assert hidden(tmp_path) == []
    assert json.loads((tmp_path / "two.samples.json").read_text())["processes"] == 2


def test_what_a_kill_left_half_written_goes_with_the_next_run(tmp_path: Path) -> None:
    for name in (".a.json.mmdgs-tmp", "parts/.b.png.mmdgs-tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".mine").write_bytes(b"somebody's")
    with output_folder(tmp_path):
        assert {path.name for path in tmp_path.rglob("*")} == {".lock", ".mine", "parts"}
