"""Blocks of steps without a look at a number: the same chain as one by one, to the last bit, and the same errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import mmdgs
from mmdgs import recording
from mmdgs.cost import counting
from mmdgs.linalg.operators import checks_deferred, raise_non_finite
from mmdgs.networks import MLP
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Streams, Tape, randn, signs
from mmdgs.samplers import blocks, driver
from mmdgs.samplers.plans import Step

LEVEL = NoiseLevel(sigma=0.3)
SCALED = NoiseLevel(alpha=0.8, sigma=0.5)


def energy(d: int = 2) -> nn.Module:
    return MLP(d, 2, width=16, depth=2, seed=3).double()


def isotropic(denoiser: mmdgs.Denoiser) -> mmdgs.Moments:
    return mmdgs.IsotropicMoments(denoiser, {LEVEL: 0.04, SCALED: 0.1})


MOMENTS = {
    "full": lambda d: mmdgs.FullMoments(mmdgs.energy_denoiser(energy(d))),
    "full, by products": lambda d: mmdgs.FullMoments(mmdgs.score_denoiser(MLP(d, d, width=8, seed=1).double())),
    "much repaired": lambda d: mmdgs.FullMoments(mmdgs.energy_denoiser(energy(d)), floor=0.9),
    "probes": lambda d: mmdgs.DiagonalMoments(mmdgs.energy_denoiser(energy(d)), probes=3),
    "diagonal": lambda d: mmdgs.DiagonalMoments(mmdgs.clean_denoiser(MLP(d, d, width=8, seed=1).double()), probes=None),
    "isotropic": lambda d: isotropic(mmdgs.noise_denoiser(MLP(d, d, width=8, conditional=True, seed=1).double())),
    "learned": lambda d: mmdgs.LearnedMoments(MLP(d, 2 * d, width=8, seed=1).double()),
}


def assert_same(found: mmdgs.samplers.Run, expected: mmdgs.samplers.Run) -> None:
    """Every bit of it, and every count."""
    assert torch.equal(found.samples, expected.samples)
    assert torch.equal(found.state.x, expected.state.x)
    assert found.info.keys() == expected.info.keys()
    assert all(torch.equal(found.info[name], expected.info[name]) for name in expected.info)
    assert found.streams.positions == expected.streams.positions
    assert found.cost == expected.cost


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each block took, in order."""
    sizes: list[int] = []
    take = driver._Walk._take

    def noting(self, block, names, draws, size):
        sizes.append(size)
        return take(self, block, names, draws, size)

    monkeypatch.setattr(driver._Walk, "_take", noting)
    return sizes


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize(("chains", "d"), [(1, 2), (3, 2), (70, 2), (4, 5)], ids=str)
@pytest.mark.parametrize("pair", [(LEVEL, CLEAN), (SCALED, NoiseLevel(alpha=0.9, sigma=0.2))], ids=["clean", "bridge"])
def test_a_chain_in_blocks_is_the_chain_one_by_one(make, chains: int, d: int, pair, taken: list[int]) -> None:
    kernel, x0 = mmdgs.Gibbs(make(d)), torch.linspace(-1, 1, chains * d, dtype=torch.float64).reshape(chains, d)
    steps = 1 + blocks.ON_CPU + 7  # the first alone, a whole block and a part of one
    plain = mmdgs.run(kernel, x0, [pair] * steps, seed=4, progress=None, blocks=False)
    assert taken == []
    assert_same(mmdgs.run(kernel, x0, [pair] * steps, seed=4, progress=None), plain)
    assert taken == [blocks.ON_CPU, 7]


KEPT = [(0, 1), (5, 1), (0, 4), (3, 7), (40, 5), (64, 33), (0, 100), (99, 1)]


@pytest.mark.parametrize(
    ("steps", "burn_in", "thin"),
    [(steps, *kept) for steps in (100, 33, 34, 3) for kept in KEPT if sum(kept) <= steps],
)
def test_burn_in_and_thinning_in_blocks(steps: int, burn_in: int, thin: int, taken: list[int]) -> None:
    kernel, x0 = mmdgs.Gibbs(MOMENTS["full"](2)), torch.zeros(2, 2, dtype=torch.float64)
    options = {"seed": 1, "burn_in": burn_in, "thin": thin, "progress": None}
    plain = mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * steps, blocks=False, **options)
    assert_same(mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * steps, **options), plain)
    assert sum(taken) == steps - 1


def test_a_path_of_runs_of_equal_steps(taken: list[int]) -> None:
    # Two levels, 20 steps each, and a kernel that is not known in between; info of one kernel alone.
    full, learned = mmdgs.Gibbs(MOMENTS["full"](2)), mmdgs.Gibbs(MOMENTS["learned"](2))
    steps = [Step(full, LEVEL, CLEAN)] * 20 + [Step(learned, SCALED, CLEAN)] * 20 + [Step(full, SCALED, CLEAN)] * 9
    x0 = torch.zeros(3, 2, dtype=torch.float64)
    walk = [driver._walk(steps, x0, 7, 0, 0, 1, None, None, blocks=one) for one in (False, True)]
    assert_same(walk[1], walk[0])
    assert taken == [19, 19, 8]


def test_streams_go_on_after_blocks_as_after_steps() -> None:
    kernel, x0 = mmdgs.Gibbs(MOMENTS["probes"](2)), torch.zeros(3, 2, dtype=torch.float64)
    whole = mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 90, seed=5, progress=None, blocks=False)
    first = mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 41, seed=5, progress=None)
    kept = Streams(5, 3, positions=first.streams.positions)
    for streams in (kept, first.streams):
        rest = mmdgs.run(kernel, first.state.x, [(LEVEL, CLEAN)] * 49, seed=streams, progress=None)
        assert torch.equal(torch.cat([first.samples, rest.samples]), whole.samples)


class BreaksFar(nn.Module):
    """The score of a drift to the right that breaks beyond a wall: in its value, or in its derivative alone."""

    def __init__(self, part: str, wall: float) -> None:
        super().__init__()
        self.part, self.wall = part, wall

    def forward(self, x: Tensor) -> Tensor:
        beyond = (x[:, :1] > self.wall) & torch.tensor([True, False])
        # sqrt at zero: a value that is finite and a derivative that is not.
        root = torch.where(beyond, x - x.detach(), 1.0).sqrt()
        return 20.0 + 0 * x + torch.where(beyond, root if self.part == "covariance" else math.nan, 0.0)


@pytest.mark.parametrize("part", ["mean", "covariance"])
@pytest.mark.parametrize("make", [mmdgs.FullMoments, lambda den: mmdgs.DiagonalMoments(den, probes=2)])
def test_what_is_not_finite_is_named_as_one_by_one(part: str, make, taken: list[int]) -> None:
    # 0.2 a step to the right, and 0.14 of noise: chain 1 is at the wall after 50 steps, give or take 5, in the second
    # block; the others are not there after 100.
    level = NoiseLevel(sigma=0.1)
    kernel = mmdgs.Gibbs(make(mmdgs.score_denoiser(BreaksFar(part, wall=1.0))))
    x0 = torch.tensor([[-30.0, 0.0], [-9.0, 0.0], [-30.0, 0.0]], dtype=torch.float64)
    errors, positions = [], []
    for one in (False, True):
        streams = Streams(2, 3)
        with pytest.raises(mmdgs.NonFiniteError, match=f"the denoising {part} is not finite at step") as found:
            mmdgs.run(kernel, x0, [(level, CLEAN)] * 100, seed=streams, first_chain=10, progress=None, blocks=one)
        errors.append(found.value)
        positions.append(streams.positions)
    assert str(errors[0]) == str(errors[1])
    assert errors[1].chains == [11]
    assert errors[1].step > 1 + blocks.ON_CPU
    assert positions[0] == positions[1]
    assert len(taken) == 2


class RaisesFar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 2:
            raise RuntimeError(f"far out at {x.max().item():.6f}")
        return 1.0 + 0 * x


def test_an_error_of_the_network_is_the_one_it_raised(taken: list[int]) -> None:
    kernel, x0 = mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(RaisesFar()))), torch.zeros(2, 2, dtype=torch.float64)
    found = []
    for one in (False, True):
        with pytest.raises(RuntimeError, match="far out at") as error:
            mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 100, seed=2, progress=None, blocks=one)
        found.append(str(error.value))
    assert found[0] == found[1]
    assert taken


def test_a_false_alarm_goes_on_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where a recorded block is longer than what is left of a run, and breaks in the part that is dropped.
    made = blocks.block_of

    def alarmed(step: Step) -> blocks.Block:
        block = made(step)

        def false(x, totals, numbers, steps):
            found = block(x, totals, numbers, steps)
            return blocks.Outcome(found.states, found.totals, torch.tensor(False))

        return false

    kernel, x0 = mmdgs.Gibbs(MOMENTS["probes"](2)), torch.zeros(2, 2, dtype=torch.float64)
    plain = mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 50, seed=2, progress=None, blocks=False)
    monkeypatch.setattr(blocks, "block_of", alarmed)
    assert_same(mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 50, seed=2, progress=None), plain)


class Counts(nn.Module):
    """Draws no numbers of its own, but a hook could."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


def hooked() -> nn.Module:
    network = nn.Sequential(Counts())
    network[0].register_forward_hook(lambda *_: None)
    return network


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(lambda x: 0 * x))), (2, 2)),
        (mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(hooked()))), (2, 2)),
        (mmdgs.Gibbs(isotropic(lambda x, level: 0 * x)), (2, 2)),
        (mmdgs.Gibbs(mmdgs.KrylovMoments(mmdgs.score_denoiser(Counts()), steps=1)), (2, 2)),
        (mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(Counts()))), (2, 1, 2, 2)),
        (mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(Counts()))), (2, blocks.LARGEST_ROW + 1)),
        (mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(Counts()))), (blocks.LARGEST_STATE // 2 + 1, 2)),
    ],
    ids=["function", "hook", "denoiser", "krylov", "image", "long row", "large"],
)
def test_what_is_not_known_goes_one_by_one(kernel: mmdgs.Kernel, shape: tuple[int, ...]) -> None:
    assert not blocks.suited(Step(kernel, LEVEL, CLEAN), torch.zeros(shape), 1000)
    known = mmdgs.Gibbs(isotropic(mmdgs.score_denoiser(Counts())))
    assert blocks.suited(Step(known, LEVEL, CLEAN), torch.zeros(2, 2), 1000)


def test_a_callback_is_called_after_each_step(taken: list[int]) -> None:
    kernel, x0, seen = mmdgs.Gibbs(MOMENTS["full"](2)), torch.zeros(2, 2, dtype=torch.float64), []
    found = mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 40, callback=lambda *what: seen.append(what[1].x), progress=None)
    assert taken == []
    assert torch.equal(torch.stack(seen), found.samples)
    assert_same(mmdgs.run(kernel, x0, [(LEVEL, CLEAN)] * 40, progress=None), found)


# --- the block itself -------------------------------------------------------------------------------------------


def test_a_block_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor becomes a Python number inside a block: that is what a CUDA graph forbids."""
    looked: list[str] = []
    for name in ("__bool__", "item", "tolist", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, lambda self, name=name: looked.append(name))
    x, totals = torch.zeros(70, 2, dtype=torch.float64), {"repaired": torch.zeros(70, dtype=torch.float64)}
    for make, draws in ((MOMENTS["full"], {"normal": 4}), (MOMENTS["probes"], {"normal": 4, "sign": 6})):
        numbers = {kind: torch.ones(70, 5 * count, dtype=torch.float64) for kind, count in draws.items()}
        with torch.no_grad():
            blocks.block_of(Step(mmdgs.Gibbs(make(2)), LEVEL, CLEAN))(x, totals, numbers, 5)
    assert looked == []


def test_a_block_refuses_steps_that_differ() -> None:
    step = Step(mmdgs.Gibbs(MOMENTS["full"](2)), LEVEL, CLEAN)
    x, zero = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    numbers = {"normal": torch.ones(1, 9, dtype=torch.float64)}
    with torch.no_grad(), pytest.raises(ValueError, match="the same number of random numbers"):
        blocks.block_of(step)(x, {"repaired": zero}, numbers, 2)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"the same info, got \['repaired'\] after \['krylov_error'\]"),
    ):
        blocks.block_of(step)(x, {"krylov_error": zero}, numbers, 2)


def test_checks_are_put_off_and_not_lost() -> None:
    broken = torch.tensor([[1.0], [math.nan]])
    with checks_deferred() as unseen:
        raise_non_finite("state", broken)
    assert len(unseen) == 1
    assert unseen[0] is broken
    with pytest.raises(mmdgs.NonFiniteError, match="state is not finite at chain 1"):
        raise_non_finite("state", broken)


def test_counting_apart_leaves_the_others_as_they_were() -> None:
    with counting() as outer:
        with counting(apart=True) as inner:
            mmdgs.denoisers.spend(forwards=2)
        mmdgs.denoisers.spend(forwards=1)
    assert (outer.forwards, inner.forwards) == (1, 2)


def test_a_recording_that_fails_is_said_once_and_steps_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nand a trace")

    monkeypatch.setattr(blocks, "CapturedBlock", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    step, x = Step(mmdgs.Gibbs(MOMENTS["full"](2)), LEVEL, CLEAN), torch.zeros(1, 2, device="meta")
    monkeypatch.setattr(Tensor, "device", property(lambda _: torch.device("cuda", 0)))
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        assert blocks.prepared(step, x, {}, {"normal": 4}, 100) is None
    assert [record.getMessage() for record in caplog.records] == [
        "steps cannot be recorded as a CUDA graph (called a synchronizing CUDA operation); taking them one by one"
    ]


class Replayed:
    """Stands in for a CUDA graph: a replay computes the recorded block again, from the same buffers into the same."""

    def __init__(self) -> None:
        self.replay = None
        self.open = False

    def capture_begin(self, pool: object, **_: object) -> None:
        self.open, self.memory = True, pool or object()

    def pool(self) -> object:
        return self.memory

    def capture_end(self) -> None:
        self.open = False


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[blocks.CapturedBlock]:
    """Recorded blocks of 16 steps on the CPU, as they are made."""
    made: list[blocks.CapturedBlock] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(recording, "_kept", threading.local())
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(recording, "_recording_stream", lambda _: stream)

    def prepared(step, x, totals, draws, steps):
        block = blocks.block_of(step)
        found = blocks.CapturedBlock(block, x, totals, draws, 16)

        def replay() -> None:
            again = block(found.x, found.totals, found.numbers, found.steps)
            found.outcome.states.copy_(again.states)
            found.outcome.finite.copy_(again.finite)
            for name, total in again.totals.items():
                found.outcome.totals[name].copy_(total)

        def counted() -> None:
            with counting(apart=True):  # a graph runs no Python
                replay()

        found.recording.graph.replay = counted
        made.append(found)
        return found, 16

    monkeypatch.setattr(driver, "prepared", prepared)
    return made


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("steps", [1 + 3 * 16, 1 + 2 * 16 + 5])
def test_buffers_that_are_written_over_leave_the_chain_as_it_is(make, steps: int, graphs, taken: list[int]) -> None:
    kernel, x0 = mmdgs.Gibbs(make(2)), torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)
    path = [(LEVEL, CLEAN)] * steps
    plain = mmdgs.run(kernel, x0, path, seed=4, burn_in=3, thin=2, progress=None, blocks=False)
    assert_same(mmdgs.run(kernel, x0, path, seed=4, burn_in=3, thin=2, progress=None), plain)
    assert sum(taken) == steps - 1
    mmdgs.run(kernel, x0, path, progress=None)
    first, second = (one.recording.graph for one in graphs)
    assert first.memory is second.memory, "one run's memory serves the next"
    assert not first.open
    assert recording._unfinished == []


def test_a_step_that_waits_for_the_device_is_not_recorded(graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    block = blocks.block_of(Step(mmdgs.Gibbs(MOMENTS["full"](2)), LEVEL, CLEAN))

    def waits(*given):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        return block(*given)

    begun = []
    monkeypatch.setattr(Replayed, "capture_begin", lambda *_, **__: begun.append(1))
    x, totals = torch.zeros(1, 2, dtype=torch.float64), {"repaired": torch.zeros(1, dtype=torch.float64)}
    said = "called a synchronizing"
    with torch.no_grad(), pytest.warns(UserWarning, match=said), pytest.raises(RuntimeError, match=said):
        blocks.CapturedBlock(waits, x, totals, {"normal": 4}, 8)
    assert begun == []
    with torch.no_grad():
        blocks.CapturedBlock(block, x, totals, {"normal": 4}, 8)
    assert begun == [1]


def test_a_recording_that_fails_takes_its_memory_with_it(graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    block = blocks.block_of(Step(mmdgs.Gibbs(MOMENTS["full"](2)), LEVEL, CLEAN))
    x, totals = torch.zeros(1, 2, dtype=torch.float64), {"repaired": torch.zeros(1, dtype=torch.float64)}

    def fails(x, totals, numbers, steps):
        if steps > 1:  # not in the warm-up
            raise RuntimeError("operation not permitted when stream is capturing")
        return block(x, totals, numbers, steps)

    monkeypatch.setattr(recording, "_unfinished", unfinished := [])
    with torch.no_grad():
        first = blocks.CapturedBlock(block, x, totals, {"normal": 4}, 8)
        with pytest.raises(RuntimeError, match="not permitted"):
            blocks.CapturedBlock(fails, x, totals, {"normal": 4}, 8)
        third = blocks.CapturedBlock(block, x, totals, {"normal": 4}, 8)
    assert len(unfinished) == 1
    assert third.recording.graph.memory is not first.recording.graph.memory
    assert gc.isenabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("chains", [1, 70])
def test_a_chain_as_cuda_graphs_is_the_chain_one_by_one(make, chains: int, caplog: pytest.LogCaptureFixture) -> None:
    post = make(2)
    (getattr(post, "network", None) or post.denoiser.network).cuda()
    x0 = torch.zeros(chains, 2, dtype=torch.float64, device="cuda")
    plain = mmdgs.run(mmdgs.Gibbs(post), x0, [(LEVEL, CLEAN)] * 150, seed=4, progress=None, blocks=False)
    assert_same(mmdgs.run(mmdgs.Gibbs(post), x0, [(LEVEL, CLEAN)] * 150, seed=4, progress=None), plain)
    assert "CUDA graph" not in caplog.text


# --- the tape ---------------------------------------------------------------------------------------------------


def test_a_tape_gives_the_numbers_of_its_streams_in_their_order() -> None:
    like, streams, same = torch.empty(0, dtype=torch.float64), Streams(3, 4), Streams(3, 4)
    randn((4, 3), like, streams)  # not from the first number on
    randn((4, 3), like, same)
    tape = Tape(same.ahead({"normal": 12, "sign": 5, "uniform": 0}, torch.float64, like.device), 4)
    for draw, shape in ((randn, (4, 2, 3)), (signs, (4, 1)), (randn, (4, 6)), (signs, (4, 4))):
        assert not tape.used_up
        assert torch.equal(draw(shape, like, tape), draw(shape, like, streams))
    assert tape.used_up
    assert same.positions == streams.positions
    with pytest.raises(ValueError, match="holds 12 numbers of kind 'normal' a row, and 13 are wanted"):
        randn((4, 1), like, tape)
    with pytest.raises(ValueError, match="holds 0 numbers of kind 'uniform' a row, and 1 are wanted"):
        mmdgs.randomness.uniforms((4, 1), like, tape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tape_for_short_numbers(dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    tape = Tape(Streams(3, 2).ahead({"normal": 4}, dtype, like.device), 2)
    assert torch.equal(randn((2, 4), like, tape), randn((2, 4), like, Streams(3, 2)))
    with pytest.raises(ValueError, match=r"the tape is torch.float32 on cpu, and torch.float64 on cpu is wanted"):
        randn((2, 1), torch.empty(0, dtype=torch.float64), Tape(tape.numbers, 2))


def test_streams_go_back() -> None:
    streams, like = Streams(3, 2), torch.empty(0)
    randn((2, 5), like, streams)
    start = streams.positions
    numbers = randn((2, 7), like, streams)
    signs((2, 7), like, streams)
    streams.go_to(start)
    assert streams.positions == start
    assert torch.equal(randn((2, 7), like, streams), numbers)
