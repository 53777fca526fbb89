"""The training loop: the same losses however a batch is cut, formulas by hand, and what happens
when things fail.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from nets import random_images, tiny_model
from torch import Tensor, nn

import mmdgs
from mmdgs import losses
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.models import Model
from mmdgs.networks import MLP, RowDropout
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams, child_seed, randn_like, seeded, uniforms
from mmdgs.runtime import side_by_side
from mmdgs.schedules import geometric
from mmdgs.training import (
    ImageExamples,
    Interrupted,
    RunFolder,
    TensorExamples,
    Trained,
    Trainer,
    TrainingSettings,
    Validation,
    loss_of,
    metrics,
    stopping,
    train,
)
from mmdgs.training.objective import PerExampleLoss

MANY = {"sigma": None, "sigmas": tuple(level.sigma for level in geometric(5, 10, 0.1))}
SETTINGS = TrainingSettings(steps=3, batch_size=12, learning_rate=1e-3)
IMAGES, HELD_OUT = random_images(30), random_images(17, seed=9)


def settings(**changes: object) -> TrainingSettings:
    return dataclasses.replace(SETTINGS, **changes)


def small(param: str = "score", *, dropout: float = 0.2, **options: object) -> Model:
    """A U-Net of one resolution, with dropout."""
    options = {**tiny_model().config.options, "multipliers": [1], "dropout": dropout, **options}
    return tiny_model(param, options=options, **(MANY if "conditional" in options else {}))


def many_levels(param: str = "edm") -> Model:
    """A conditional model of five levels."""
    return small(param, conditional=True)


def trainer_of(model: Model, loss: PerExampleLoss | None = None, **more: object) -> Trainer:
    """A trainer on random images; `more` are its own arguments and settings."""
    own = {key: more.pop(key) for key in ("validation", "watcher", "keep", "folder") if key in more}
    loss = loss or loss_of(model)
    return Trainer(model.network, loss, ImageExamples(IMAGES), settings(**more), **own)


def fit(
    model: Model | None = None, loss: PerExampleLoss | None = None, **more: object
) -> tuple[Trained, Model]:
    """Train a tiny U-Net; returns what the run left and the model."""
    model = model or small()
    return trainer_of(model, loss, **more).run(None), model


@functools.cache
def undisturbed(steps: int = 3) -> Tensor:
    """The losses of a run that nothing happens to."""
    return fit(steps=steps)[0].losses


def vector(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


class Weight(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def fit_weight(loss, *, data: Tensor | None = None, **changes) -> tuple[Trained, Weight]:
    """Train one number on `loss(weight, batch)`, one value a row."""
    network = Weight()
    examples = TensorExamples(torch.ones(4, 1, dtype=torch.float64) if data is None else data)
    own = settings(**{"batch_size": 4, **changes})
    return Trainer(network, lambda x, _: loss(network, x), examples, own).run(None), network


# --- the same losses however a batch is cut


@pytest.mark.parametrize(("param", "draw"), [("edm", "mixed"), ("mean-std", "lognormal")])
def test_a_batch_in_parts_gives_the_same_losses_at_many_levels(param: str, draw: str) -> None:
    whole, parts = (
        fit(model, loss_of(model, weighting="edm", draw=draw), split=split)[0].losses
        for model, split in ((many_levels(param), 1), (many_levels(param), 5))
    )
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=0)
    assert whole.std() > 1e-2 * whole.mean()  # other levels at every step


@pytest.mark.parametrize("param", ["energy", "score", "mean-std"])
def test_a_batch_in_parts_gives_the_same_losses_and_weights(param: str) -> None:
    whole, first = fit(small(param))
    parts, second = fit(small(param), split=5)  # parts of twelve rows that are not of one size
    assert parts.split == 5
    torch.testing.assert_close(parts.losses, whole.losses, rtol=1e-5, atol=0)
    # Of all weights together: Adam magnifies the rounding of a gradient that should be zero.
    apart = (vector(second.network) - vector(first.network)).norm()
    assert apart < 0.02 * (vector(first.network) - vector(small(param).network)).norm()
    assert whole.losses.std() > 1e-3


@pytest.mark.parametrize(
    ("most", "from_call", "parts"), [(5, 0, 4), (1, 0, 12), (6, 1, 2)],
    ids=["four parts", "one by one", "in the middle of a run"],
)  # fmt: skip
def test_a_step_that_does_not_fit_in_memory_is_taken_in_parts(
    most: int, from_call: int, parts: int, caplog
) -> None:
    model, rows = small(), []
    plain = loss_of(model)

    def limited(x: Tensor, generator: Generator) -> Tensor:
        value = plain(x, generator)  # after it has drawn its noise
        rows.append(len(x))
        if len(x) > most and len(rows) > from_call:
            raise torch.OutOfMemoryError("out of memory")
        return value

    trained, _ = fit(model, limited)
    assert trained.split == parts
    torch.testing.assert_close(trained.losses, undisturbed(), rtol=1e-5, atol=0)
    assert rows.count(12) == 1 + from_call, "it must not try the whole batch at every step"
    assert f"{parts} parts" in caplog.messages[-1]


# --- one number, by hand


def linear(network: Weight, x: Tensor) -> Tensor:
    return network.value * x[:, 0]


@pytest.mark.parametrize("ema", [0.5, 0.9])  # early steps, and all, have a decay of their own
def test_the_average_is_its_recursion(ema: float) -> None:
    # A constant slope makes each Adam step move by the learning rate: the weights are -rate * (1,
    # 2, ...).
    _, network = fit_weight(linear, steps=20, learning_rate=0.1, ema=ema)
    average = 0.0
    for step in range(20):
        decay = min(ema, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * (-0.1 * (step + 1))
    assert network.value.item() == pytest.approx(average, rel=1e-6)
    _, plain = fit_weight(linear, steps=20, learning_rate=0.1)
    assert plain.value.item() == pytest.approx(-2.0, rel=1e-6)


def test_warm_up_is_linear_and_decay_a_cosine() -> None:
    schedule = settings(steps=100, learning_rate=0.1, warmup=9, decay=True)
    for step in range(100):
        expected = 0.1 * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / 100)) / 2
        assert schedule.rate(step, step / 100) == pytest.approx(expected, rel=1e-12)
    assert schedule.rate(99, 1.5) == pytest.approx(0.0, abs=1e-15)
    path = []

    def loss(network: Weight, x: Tensor) -> Tensor:
        path.append(network.value.item())
        return linear(network, x)

    _, network = fit_weight(loss, steps=30, learning_rate=0.1, warmup=9, decay=True)
    moves = [a - b for a, b in pairwise([*path, network.value.item()])]
    rates = [schedule.rate(step, step / 30) for step in range(30)]
    assert moves == pytest.approx(rates, rel=1e-5)  # Adam's epsilon


def test_clipping_bounds_the_gradient_that_is_applied() -> None:
    # Adam forgets a constant scale, so that the steps after a spike show whether it was clipped: a
    # gradient g after n ones moves by rate * m / sqrt(v) with the two moving averages.
    def path(clip: float | None) -> float:
        count = iter(range(100))

        def loss(network: Weight, x: Tensor) -> Tensor:
            return linear(network, x) * (1000.0 if next(count) == 3 else 1.0)

        return fit_weight(loss, steps=6, learning_rate=0.1, clip=clip)[1].value.item()

    def by_hand(slopes: list[float]) -> float:
        value = m = v = 0.0
        for step, slope in enumerate(slopes, start=1):
            m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
            value -= 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return value

    assert path(None) == pytest.approx(by_hand([1, 1, 1, 1000, 1, 1]), rel=1e-6)
    # torch adds 1e-6 to the norm
    assert path(5.0) == pytest.approx(by_hand([1, 1, 1, 5, 1, 1]), rel=1e-5)
    assert path(0.5) == pytest.approx(by_hand([0.5] * 6), rel=1e-5)


def test_a_run_ends_by_steps_or_by_epochs() -> None:
    data = torch.ones(10, 1, dtype=torch.float64)
    for changes, expected in (
        ({"steps": 7}, 7),
        ({"steps": None, "epochs": 3}, 3 * 2),  # two batches of four an epoch, and a rest
        ({"steps": None, "epochs": 0.4}, 1),
        ({"steps": 5, "epochs": 3}, 5),
        ({"steps": 7, "epochs": 3}, 6),
    ):
        trained, _ = fit_weight(linear, data=data, **changes)
        assert (len(trained.losses), trained.ended_by) == (expected, "steps")


def test_a_run_ends_by_minutes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    trained, _ = fit(folder=folder, steps=None, minutes=1e-9)
    assert (len(trained.losses), trained.ended_by) == (1, "minutes")
    assert folder.load().state["step"] == 1  # what is done is saved
    folder.close()
    trained, _ = fit_weight(linear, steps=3, minutes=1e9)
    assert trained.ended_by == "steps"


# --- the plain loop


def test_the_engine_is_the_plain_loop() -> None:
    # The loop as one writes it down first; fused Adam rounds differently in the last bit.
    def network() -> MLP:
        return MLP(2, 2, width=16, depth=2, seed=0)

    data, level = torch.randn(50, 2, generator=seeded(3)), NoiseLevel(sigma=0.5)
    settings = TrainingSettings(steps=40, batch_size=16, learning_rate=1e-3, seed=5)
    ours = network()
    denoiser = mmdgs.energy_denoiser(ours)

    def loss(x: Tensor, generator: Generator) -> Tensor:
        return losses.dsm(denoiser, x, level, generator=generator)

    values = train(ours, loss, data, settings, progress=None)

    plain, expected = network(), []
    optimiser = torch.optim.Adam(plain.parameters(), lr=1e-3)
    seed = child_seed(5, "run 0")
    order, noise = seeded(seed, "order"), Streams(seed, 16, purpose="noise")
    while len(expected) < 40:
        permutation = torch.randperm(50, generator=order)
        for batch in permutation[:48].split(16):
            x = data[batch]
            e = randn_like(x, noise)
            x_t = (x + 0.5 * e).requires_grad_(True)
            (slope,) = torch.autograd.grad(plain(x_t).sum(), x_t, create_graph=True)
            loss = 0.5 * (e / 0.5 - slope).square().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            expected.append(loss.item())
    torch.testing.assert_close(values, torch.tensor(expected[:40]), rtol=1e-4, atol=1e-5)


# --- failures


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    value: float, tmp_path: Path
) -> None:
    model, folder, count = small(), RunFolder(tmp_path, {}), iter(range(5))
    plain = loss_of(model)

    def poisoned(x: Tensor, generator: Generator) -> Tensor:
        each = plain(x, generator)
        return torch.cat([each[:-1], each[-1:] * value]) if next(count) == 3 else each

    with pytest.raises(NonFiniteError, match="last good checkpoint is kept") as caught:
        fit(model, poisoned, folder=folder, steps=5, checkpoint_every=2)
    assert caught.value.step == 3
    # The checkpoint of step 2 is whole, and what follows from it is what would have been.
    kept = folder.load()
    assert kept.state["step"] == 2
    assert all(torch.isfinite(v).all() for group in kept.tensors.values() for v in group.values())
    folder.close()
    whole = undisturbed(5)
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(whole[:3].tolist())
    resumed, _ = fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert torch.equal(resumed.losses, whole)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    folder, model = RunFolder(tmp_path, {}), tiny_model()

    def loss(x: Tensor, generator: Generator) -> Tensor:
        # Finite, but with a gradient that is not: sqrt at zero.
        return loss_of(model)(x, generator) + (model.network.first.bias.sum() * 0).sqrt()

    with pytest.raises(NonFiniteError, match="weights"):
        fit(model, loss, folder=folder, steps=1)
    folder.close()
    assert folder.load() is None


# --- checkpoints


@pytest.mark.parametrize(
    ("levels", "optimiser", "layout"),
    [
        ("one level", "adam", torch.contiguous_format),
        ("one level", "muon", torch.channels_last),
        ("many levels", "adam", torch.channels_last),
    ],
)
def test_a_run_in_two_halves_is_the_run_in_one(
    levels: str, optimiser: str, layout: torch.memory_format, tmp_path: Path
) -> None:
    def model() -> Model:
        width = 32 if optimiser == "muon" else 8
        fresh = many_levels() if levels == "many levels" else small(width=width)
        fresh.network.to(memory_format=layout)
        return fresh

    common = {"ema": 0.9, "checkpoint_every": 100, "clip": 1.0, "optimiser": optimiser}
    whole, first = fit(model(), steps=5, **common)
    for steps in (2, 5):
        folder = RunFolder(tmp_path, {"a": 1})
        halves, second = fit(model(), folder=folder, steps=steps, **common)
        folder.close()
    assert torch.equal(halves.losses, whole.losses)
    assert torch.equal(vector(first.network), vector(second.network))
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 6))


def test_a_run_that_goes_on_may_be_cut_otherwise(tmp_path: Path) -> None:
    fit(folder=RunFolder(tmp_path, {}), steps=2)
    resumed, _ = fit(folder=RunFolder(tmp_path, {}), steps=4, split=3)
    assert resumed.split == 3
    torch.testing.assert_close(resumed.losses, undisturbed(4), rtol=1e-5, atol=0)


def signalled(
    model: Model, at: int, *numbers: signal.Signals, later: float = 0.0
) -> PerExampleLoss:
    """A loss that sends its process signals in the middle of step `at`, `later` seconds apart."""
    loss, calls = loss_of(model), itertools.count(1)

    def sending(x: Tensor, generator: Generator) -> Tensor:
        for number in numbers if next(calls) == at else ():
            os.kill(os.getpid(), number)
            time.sleep(later)
        return loss(x, generator)

    return sending


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGTERM, 1), (signal.SIGINT, 2)],
    ids=["once", "passed on by a launcher"],
)
def test_a_signal_waits_for_the_step_and_its_checkpoint(
    number: signal.Signals, times: int, tmp_path: Path
) -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    folder, model = RunFolder(tmp_path, {}), small()
    with pytest.raises(Interrupted) as caught:
        fit(model, signalled(model, 2, *[number] * times), folder=folder, steps=5)
    assert (caught.value.step, caught.value.signal) == (2, number)
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before
    assert folder.state()["step"] == 2
    resumed, _ = fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert torch.equal(resumed.losses, undisturbed(5))


@pytest.mark.parametrize(("every", "batch", "step"), [(2, 2, 2), (2, 8, 5), (None, 2, 5)])
def test_a_signal_cuts_a_validation_which_is_made_up_for(
    every: int | None, batch: int, step: int, tmp_path: Path
):
    calls: list[int] = []

    def run(at: int | None = None, folder: RunFolder | None = None) -> Trained:
        """Train with three batches of validation, the `at`-th of which is interrupted."""
        model = small()
        loss = loss_of(model) if at is None else signalled(model, at, signal.SIGINT)

        def counted(x: Tensor, generator: Generator) -> Tensor:
            calls.append(len(x))
            return loss(x, generator)

        validation = Validation(ImageExamples(IMAGES), counted)
        return fit(model, validation=validation, folder=folder, steps=5, validate_every=every)[0]

    whole = run()
    for at in (batch, 1):  # and again, in the first batch of what is made up for
        calls.clear()
        with pytest.raises(Interrupted) as caught:
            run(at, RunFolder(tmp_path, {}))
        assert (caught.value.step, len(calls)) == (step, at)  # no batch after the signal
    resumed = run(folder=RunFolder(tmp_path, {}))
    assert resumed.validations == whole.validations
    assert torch.equal(resumed.losses, whole.losses)


@pytest.mark.parametrize(("every", "at"), [(2, 2), (None, 5)])
def test_no_look_is_begun_after_a_signal_and_it_is_made_up_for(
    every: int | None, at: int, tmp_path: Path
):
    looks: list[int] = []

    class Looking:
        judged_by = None

        def look(self, step: int, /) -> dict[str, float]:
            looks.append(step)
            return {"seen": float(step)}

    def run(*signals: signal.Signals, folder: RunFolder | None = None) -> Trained:
        model = small()
        loss = signalled(model, at, *signals)
        common = {"steps": 5, "watch": 4, "watch_every": every}
        return fit(model, loss, watcher=Looking(), folder=folder, **common)[0]

    whole = run()
    assert looks == ([2, 4, 5] if every else [5])
    looks.clear()
    with pytest.raises(Interrupted) as caught:
        run(signal.SIGINT, folder=RunFolder(tmp_path, {}))
    assert (caught.value.step, looks) == (at, [])
    resumed = run(folder=RunFolder(tmp_path, {}))
    assert looks == ([2, 4, 5] if every else [5])
    assert resumed.watches == whole.watches
    assert torch.equal(resumed.losses, whole.losses)


@pytest.mark.parametrize("times", [1, 2], ids=["without a folder", "a second time"])
def test_a_signal_that_stops_at_once(times: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST", 0.01)
    folder, model = RunFolder(tmp_path, {}) if times == 2 else None, small()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(
            model, signalled(model, 2, *[signal.SIGINT] * times, later=0.05), folder=folder, steps=5
        )
    assert not isinstance(caught.value, Interrupted)
    assert folder is None or folder.state() is None


def test_a_job_that_its_companions_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})

    def endless() -> None:
        fit(folder=folder, steps=10**6)

    def fails() -> None:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.01)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        side_by_side([endless, fails], workers=2)
    assert folder.state()["step"] == len(metrics(tmp_path))


def test_metrics_with_a_last_line_cut_short(tmp_path: Path) -> None:
    fit(folder=RunFolder(tmp_path, {}), steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]


# --- validation


def validated(**more: object) -> tuple[Trained, list[tuple[float, int, Tensor]], Model]:
    """Train with validation; also what was kept as best: value, step and the first weights."""
    model = small()
    best: list[tuple[float, int, Tensor]] = []

    def keep(what: str, value: float, step: int, seconds: float) -> None:
        assert what == "validation loss"
        best.append((value, step, model.network.first.weight.detach().clone()))

    validation = Validation(ImageExamples(HELD_OUT), loss_of(model))
    trained, _ = fit(model, validation=validation, keep=keep, **more)
    return trained, best, model


@pytest.mark.parametrize("rate", [1e-12, 0.03], ids=["hardly any step", "large steps"])
def test_validation_is_of_the_average_with_the_same_noise_every_time(rate: float) -> None:
    trained, _, model = validated(steps=6, validate_every=2, ema=0.9, learning_rate=rate)
    assert [step for step, _ in trained.validations] == [2, 4, 6]
    # By hand, in one batch: the noise is that of the rows, not of the batches. The network ends
    # with its average, so the last number is that of the weights it has now, without dropout.
    streams = Streams(0, 17, purpose="validation")
    x = ImageExamples(HELD_OUT).take(torch.arange(17), streams)
    with torch.no_grad():
        expected = loss_of(model)(x, streams).mean().item()
    assert trained.validations[-1][1] == pytest.approx(expected, rel=1e-5)
    moved = trained.validations[0][1] != pytest.approx(expected, rel=1e-3)
    assert moved == (rate > 1e-3)
    if not moved:
        assert len({round(value, 5) for _, value in trained.validations}) == 1


def test_the_best_is_the_lowest_and_holds_the_averaged_weights() -> None:
    trained, best, model = validated(steps=12, validate_every=2, ema=0.5, learning_rate=0.05)
    values = [value for _, value in trained.validations]
    assert min(values) != values[-1] or len(best) > 1
    lows = [
        (value, step)
        for i, (step, value) in enumerate(trained.validations)
        if value < min([math.inf, *values[:i]])
    ]
    assert [(value, step) for value, step, _ in best] == lows
    if best[-1][1] == 12:
        assert torch.equal(best[-1][2], model.network.first.weight)


def test_a_run_that_goes_on_keeps_a_best_model_from_before(tmp_path: Path) -> None:
    common = {"folder": RunFolder(tmp_path, {}), "validate_every": 1}
    _, before, _ = validated(steps=2, learning_rate=0.01, **common)
    # The second half makes everything worse: all that is best was kept in the first.
    trained, after, _ = validated(steps=4, learning_rate=3.0, **common)
    values = [value for _, value in trained.validations]
    assert len(values) == 4
    assert min(values[2:]) > min(values[:2])
    assert min(value for value, _, _ in before) == min(values)
    assert after == []


# --- precision and dropout


@pytest.mark.parametrize("param", ["energy", "mean-std"])
def test_bf16_runs_on_a_cpu_and_is_near_float32(param: str) -> None:
    exact, _ = fit(small(param, dropout=0.0))
    rough, model = fit(small(param, dropout=0.0), precision="bf16")
    assert all(p.dtype == torch.float32 for p in model.network.parameters())
    assert not torch.equal(rough.losses, exact.losses)
    # Eight bits of precision in each product, and three steps.
    torch.testing.assert_close(rough.losses, exact.losses, rtol=0.1, atol=0)


def test_dropout_has_the_keys_of_the_rows_own_streams() -> None:
    # One dropout layer on ones: the loss is the share kept, from keys that are the rows' first
    # uniform numbers.
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.dropout = RowDropout(0.5, 0)

    network, seen = Dropping(), []

    def loss(x: Tensor, generator: Generator) -> Tensor:
        seen.append(network.dropout.keys.clone())
        return (network.dropout(torch.ones(len(x), 64)) * network.scale).sum(1)

    examples = TensorExamples(torch.zeros(8, 1))
    Trainer(network, loss, examples, settings(steps=2, batch_size=8)).run(None)
    streams = Streams(child_seed(0, "run 0"), 8, purpose="noise")
    for keys in seen:
        assert torch.equal(keys, (uniforms((8, 1), torch.empty(()), streams)[:, 0] * 2**24).long())
    assert not torch.equal(seen[0], seen[1])
    assert network.dropout.keys is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", None),
        ("precision", "fp8"),
        ("optimiser", "sgd"),
        ("ema", 1.0),
        ("warmup", -1),
        ("checkpoint_every", 0),
        ("validate_every", -3),
        ("clip", 0.0),
        ("epochs", math.nan),
        ("minutes", -1.0),
    ],
)
def test_settings_that_cannot_be(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        settings(**{name: value})
