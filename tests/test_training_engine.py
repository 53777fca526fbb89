"""The training loop: the same losses however a batch is cut, formulas by hand, and what happens when things fail."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
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
    loop,
    loss_of,
    metrics,
    stopping,
    train,
)
from mmdgs.training.checkpoint import Checkpoint
from mmdgs.training.objective import PerExampleLoss

MANY = {"sigma": None, "sigmas": tuple(level.sigma for level in geometric(5, 10, 0.1))}
SETTINGS = TrainingSettings(steps=3, batch_size=12, learning_rate=1e-3)
IMAGES = random_images(30)


def settings(**changes: object) -> TrainingSettings:
    return dataclasses.replace(SETTINGS, **changes)


def small(param: str = "score", *, dropout: float = 0.2, **options: object) -> Model:
    """A U-Net of one resolution, with dropout."""
    chosen = {**tiny_model().config.options, "multipliers": [1], "dropout": dropout, **options}
    return tiny_model(param, options=chosen, **(MANY if "conditional" in options else {}))


def fit(model: Model | None = None, *, loss: PerExampleLoss | None = None, folder: RunFolder | None = None, **changes):
    """Train a tiny U-Net on random images; returns what the run left and the model."""
    model = model or small()
    trainer = Trainer(model.network, loss or loss_of(model), ImageExamples(IMAGES), settings(**changes), folder=folder)
    return trainer.run(None), model


def vector(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


class Weight(nn.Module):
    """One number."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), start, dtype=torch.float64))


def fit_weight(loss, *, data: Tensor | None = None, start: float = 0.0, **changes) -> tuple[Trained, Weight]:
    """Train one number on `loss(weight, batch)`, one value a row."""
    network = Weight(start)
    data = torch.ones(4, 1, dtype=torch.float64) if data is None else data
    changes = {"batch_size": 4, **changes}
    trainer = Trainer(network, lambda x, generator: loss(network, x), TensorExamples(data), settings(**changes))
    return trainer.run(None), network


# --- the same losses however a batch is cut ---------------------------------------------------------------------


def many_levels(param: str = "edm") -> Model:
    """A conditional model of five levels."""
    return small(param, conditional=True)


@pytest.mark.parametrize(
    ("param", "draw"),
    [("edm", "uniform"), ("edm", "lognormal"), ("edm", "mixed"), ("energy", "mixed"), ("mean-std", "lognormal")],
)
def test_a_batch_in_parts_gives_the_same_losses_at_many_levels(param: str, draw: str) -> None:
    found = []
    for split in (1, 5):
        model = many_levels(param)
        found.append(fit(model, loss=loss_of(model, weighting="edm", draw=draw), split=split)[0].losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)
    assert found[0].std() > 1e-2 * found[0].mean()  # other levels at every step


@pytest.mark.parametrize("param", ["energy", "score", "mean-std"])
def test_a_batch_in_parts_gives_the_same_losses_and_weights(param: str) -> None:
    whole, one = fit(small(param))
    for split in (4, 5):  # five parts of twelve rows are not of one size
        parts, two = fit(small(param), split=split)
        assert parts.split == split
        torch.testing.assert_close(parts.losses, whole.losses, rtol=1e-5, atol=0)
        # Of all weights together: Adam magnifies the rounding of a gradient that should be zero.
        apart = (vector(two.network) - vector(one.network)).norm()
        assert apart < 0.02 * (vector(one.network) - vector(small(param).network)).norm()
    assert whole.losses.std() > 1e-3


def needs_memory(loss: PerExampleLoss, most: int, seen: list[int]) -> PerExampleLoss:
    """A loss that runs out of memory on more rows than `most`, after it has drawn its noise."""

    def limited(x: Tensor, generator: Generator) -> Tensor:
        value = loss(x, generator)
        seen.append(len(x))
        if len(x) > most:
            raise torch.OutOfMemoryError("out of memory")
        return value

    return limited


@pytest.mark.parametrize(("most", "parts"), [(5, 4), (1, 12)])
def test_a_step_that_does_not_fit_in_memory_is_taken_in_parts(most: int, parts: int, caplog) -> None:
    whole, _ = fit()
    model = small()
    seen: list[int] = []
    found, _ = fit(model, loss=needs_memory(loss_of(model), most, seen))
    assert found.split == parts
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-5, atol=0)
    assert seen.count(12) == 1, "it must not try the whole batch again at every step"
    said = [record.getMessage() for record in caplog.records if record.name == "mmdgs"]
    assert f"a step of 12 examples does not fit in memory: taking it in {parts} parts" in said[-1]


def test_memory_that_is_short_in_the_middle_of_a_run(caplog) -> None:
    whole, _ = fit()
    model, calls = small(), []
    plain = loss_of(model)

    def loss(x: Tensor, generator: Generator) -> Tensor:
        value = plain(x, generator)
        calls.append(len(x))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return value

    found, _ = fit(model, loss=loss)
    assert found.split == 2
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-5, atol=0)


def test_memory_for_not_even_one_example() -> None:
    model = tiny_model()
    with pytest.raises(UsageError, match="not even one example fits in memory"):
        fit(model, loss=needs_memory(loss_of(model), 0, []))


def test_more_parts_than_examples_are_refused() -> None:
    with pytest.raises(UsageError, match=r"split must not be more than the 12 examples .* got 13"):
        fit(split=13)


# --- one number, by hand ----------------------------------------------------------------------------------------


def linear(network: Weight, x: Tensor) -> Tensor:
    return network.value * x[:, 0]


@pytest.mark.parametrize("ema", [0.5, 0.9])  # the first nine steps, and all of them, have a decay of their own
def test_the_average_is_its_recursion(ema: float) -> None:
    # A constant slope makes each Adam step move by the learning rate: the weights are -rate * (1, 2, ...).
    _, network = fit_weight(linear, steps=20, learning_rate=0.1, ema=ema)
    average = 0.0
    for step in range(20):
        decay = min(ema, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * (-0.1 * (step + 1))
    assert network.value.item() == pytest.approx(average, rel=1e-6)
    _, plain = fit_weight(linear, steps=20, learning_rate=0.1)
    assert plain.value.item() == pytest.approx(-2.0, rel=1e-6)


def test_warm_up_is_linear_and_decay_a_cosine() -> None:
    one = settings(steps=100, learning_rate=0.1, warmup=9, decay=True)
    for step in range(100):
        expected = 0.1 * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / 100)) / 2
        assert one.rate(step, step / 100) == pytest.approx(expected, rel=1e-12)
    assert one.rate(99, 1.5) == pytest.approx(0.0, abs=1e-15)
    path = []

    def loss(network: Weight, x: Tensor) -> Tensor:
        path.append(network.value.item())
        return linear(network, x)

    _, network = fit_weight(loss, steps=30, learning_rate=0.1, warmup=9, decay=True)
    moves = [a - b for a, b in zip(path, [*path[1:], network.value.item()], strict=True)]
    used = settings(steps=30, learning_rate=0.1, warmup=9, decay=True)
    assert moves == pytest.approx([used.rate(step, step / 30) for step in range(30)], rel=1e-5)  # Adam's epsilon


def test_clipping_bounds_the_gradient_that_is_applied() -> None:
    # Adam forgets a constant scale, so that the steps after a spike show whether it was clipped: a gradient g after
    # n ones moves by rate * m / sqrt(v) with the two moving averages.
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
    assert path(5.0) == pytest.approx(by_hand([1, 1, 1, 5, 1, 1]), rel=1e-5)  # torch adds 1e-6 to the norm
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
        found, _ = fit_weight(linear, data=data, **changes)
        assert len(found.losses) == expected
        assert found.ended_by == "steps"


def test_a_run_ends_by_minutes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    found, _ = fit(folder=folder, steps=None, minutes=1e-9)
    assert found.ended_by == "minutes"
    assert len(found.losses) == 1
    assert folder.load().state["step"] == 1  # what is done is saved
    folder.close()
    found, _ = fit_weight(linear, steps=3, minutes=1e9)
    assert found.ended_by == "steps"


def test_a_batch_is_never_larger_than_the_data() -> None:
    rows = []

    def loss(network: Weight, x: Tensor) -> Tensor:
        rows.append(len(x))
        return linear(network, x)

    fit_weight(loss, steps=3, batch_size=100)
    assert rows == [4, 4, 4]


# --- the plain loop ---------------------------------------------------------------------------------------------


def test_the_engine_is_the_plain_loop() -> None:
    # The loop as one writes it down first; fused Adam rounds differently in the last bit.
    def network() -> MLP:
        return MLP(2, 2, width=16, depth=2, seed=0)

    data, level = torch.randn(50, 2, generator=seeded(3)), NoiseLevel(sigma=0.5)
    settings = TrainingSettings(steps=40, batch_size=16, learning_rate=1e-3, seed=5)
    ours = network()
    denoiser = mmdgs.energy_denoiser(ours)
    values = train(ours, lambda x, g: losses.dsm(denoiser, x, level, generator=g), data, settings, progress=None)

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


# --- failures ---------------------------------------------------------------------------------------------------


def poisoned(loss: PerExampleLoss, at: int, value: float) -> PerExampleLoss:
    """A loss that is `value` in one example of step `at`, counted from 0."""
    count = iter(range(1000))

    def bad(x: Tensor, generator: Generator) -> Tensor:
        found = loss(x, generator)
        return torch.cat([found[:-1], found[-1:] * value]) if next(count) == at else found

    return bad


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(value: float, tmp_path: Path) -> None:
    model, folder = small(), RunFolder(tmp_path, {})
    with pytest.raises(NonFiniteError, match="the training loss is not finite at step 3") as caught:
        fit(model, loss=poisoned(loss_of(model), 3, value), folder=folder, steps=5, checkpoint_every=2)
    assert caught.value.step == 3
    for words in ("smaller learning rate", "--set clip=1", "float32", "the last good checkpoint is kept"):
        assert words in str(caught.value)
    # The checkpoint of step 2 is whole, and what follows from it is what would have been.
    kept = folder.load()
    assert kept.state["step"] == 2
    assert all(torch.isfinite(v).all() for group in kept.tensors.values() for v in group.values())
    folder.close()
    whole, _ = fit(steps=5)
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(whole.losses[:3].tolist())
    resumed, _ = fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert torch.equal(resumed.losses, whole.losses)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    model = tiny_model()

    def loss(x: Tensor, generator: Generator) -> Tensor:
        # Finite, but with a gradient that is not: sqrt at zero.
        return loss_of(model)(x, generator) + (model.network.first.bias.sum() * 0).sqrt()

    with pytest.raises(NonFiniteError, match="the network's weights"):
        fit(model, loss=loss, folder=folder, steps=1)
    folder.close()
    assert folder.load() is None


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("levels", "optimiser"), [("one level", "adam"), ("one level", "muon"), ("many levels", "adam")]
)
def test_a_run_in_two_halves_is_the_run_in_one(
    layout: torch.memory_format, levels: str, optimiser: str, tmp_path: Path
) -> None:
    def model() -> Model:
        found = many_levels() if levels == "many levels" else small(width=32 if optimiser == "muon" else 8)
        found.network.to(memory_format=layout)
        return found

    common = {"ema": 0.9, "checkpoint_every": 100, "clip": 1.0, "optimiser": optimiser}
    whole, one = fit(model(), steps=5, **common)
    for steps in (2, 5):
        folder = RunFolder(tmp_path, {"a": 1})
        found, two = fit(model(), folder=folder, steps=steps, **common)
        folder.close()
    assert torch.equal(found.losses, whole.losses)
    for a, b in zip(one.network.parameters(), two.network.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 6))


def test_the_layout_of_the_weights_changes_nothing() -> None:
    plain, _ = fit(small("score"))
    model = small("score")
    model.network.to(memory_format=torch.channels_last)
    other, _ = fit(model)
    torch.testing.assert_close(other.losses, plain.losses, rtol=1e-5, atol=0)


def test_a_run_that_goes_on_may_be_cut_otherwise(tmp_path: Path) -> None:
    whole, _ = fit(steps=4)
    fit(folder=RunFolder(tmp_path, {}), steps=2)
    found, _ = fit(folder=RunFolder(tmp_path, {}), steps=4, split=3)
    assert found.split == 3
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-5, atol=0)


def saved_steps(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which checkpoints are written into a folder from now on."""
    steps, save = [], folder.save

    def noted(checkpoint: Checkpoint) -> None:
        steps.append(checkpoint.state["step"])
        save(checkpoint)

    monkeypatch.setattr(folder, "save", noted)
    return steps


@pytest.mark.parametrize(("every", "expected"), [(4, [1, 4, 8, 9]), (None, [9])], ids=["every 4", "at the end"])
def test_a_first_checkpoint_comes_after_the_first_minute(every, expected, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "FIRST_SAVE", 0.0)
    folder = RunFolder(tmp_path, {})
    steps = saved_steps(folder, monkeypatch)
    fit(folder=folder, steps=9, checkpoint_every=every)
    assert steps == expected


def test_no_early_checkpoint_in_a_short_run(tmp_path: Path, monkeypatch) -> None:
    folder = RunFolder(tmp_path, {})
    steps = saved_steps(folder, monkeypatch)
    fit(folder=folder, steps=5, checkpoint_every=4)
    assert steps == [4, 5]


def signalled(at: int, *numbers: signal.Signals, later: float = 0.0) -> Callable[[Model], PerExampleLoss]:
    """A loss that sends signals to its own process in the middle of step `at`, `later` seconds apart."""

    def of(model: Model) -> PerExampleLoss:
        loss, calls = loss_of(model), 0

        def sending(x: Tensor, generator: Generator) -> Tensor:
            nonlocal calls
            calls += 1
            for number in numbers if calls == at else ():
                os.kill(os.getpid(), number)
                time.sleep(later)
            return loss(x, generator)

        return sending

    return of


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "passed on by a launcher"])
def test_a_signal_waits_for_the_step_and_its_checkpoint(number: signal.Signals, times: int, tmp_path: Path) -> None:
    whole, _ = fit(steps=5)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    folder, model = RunFolder(tmp_path, {}), small()
    with pytest.raises(Interrupted) as caught:
        fit(model, loss=signalled(2, *[number] * times)(model), folder=folder, steps=5)
    assert (caught.value.step, caught.value.signal) == (2, number)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert folder.state()["step"] == 2
    found, _ = fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert torch.equal(found.losses, whole.losses)


@pytest.mark.parametrize(("every", "batch", "step"), [(2, 2, 2), (2, 8, 5), (None, 2, 5)])
def test_a_signal_cuts_a_validation_which_is_made_up_for(every: int | None, batch: int, step: int, tmp_path: Path):
    def run(held_out: Callable[[Model], PerExampleLoss] = loss_of, folder: RunFolder | None = None) -> Trained:
        model = small()
        judged = Validation(ImageExamples(IMAGES), held_out(model))  # three batches
        chosen = settings(steps=5, validate_every=every)
        return Trainer(
            model.network, loss_of(model), ImageExamples(IMAGES), chosen, validation=judged, folder=folder
        ).run(None)  # fmt: skip

    calls: list[int] = []

    def counted(model: Model) -> PerExampleLoss:
        loss = signalled(batch if not calls else 1, signal.SIGINT)(model)

        def counting(x: Tensor, generator: Generator) -> Tensor:
            calls.append(len(x))
            return loss(x, generator)

        return counting

    whole = run()
    with pytest.raises(Interrupted) as caught:
        run(counted, RunFolder(tmp_path, {}))
    assert caught.value.step == step
    assert len(calls) == batch  # none after the signal
    with pytest.raises(Interrupted) as caught:
        run(counted, RunFolder(tmp_path, {}))  # and again, in the first batch of what is made up for
    assert (caught.value.step, len(calls)) == (step, batch + 1)
    found = run(folder=RunFolder(tmp_path, {}))
    assert found.validations == whole.validations
    assert torch.equal(found.losses, whole.losses)


@pytest.mark.parametrize(("every", "at", "step"), [(2, 2, 2), (None, 5, 5)])
def test_no_look_is_begun_after_a_signal_and_it_is_made_up_for(every: int | None, at: int, step: int, tmp_path: Path):
    looks: list[int] = []

    class Looking:
        judged_by = None

        def look(self, step: int, /) -> dict[str, float]:
            looks.append(step)
            return {"seen": float(step)}

    def run(folder: RunFolder | None = None, loss: Callable[[Model], PerExampleLoss] = loss_of) -> Trained:
        model = small()
        chosen = settings(steps=5, watch=4, watch_every=every)
        trainer = Trainer(model.network, loss(model), ImageExamples(IMAGES), chosen, watcher=Looking(), folder=folder)
        return trainer.run(None)

    whole = run()
    expected = [2, 4, 5] if every else [5]
    assert looks == expected
    looks.clear()
    with pytest.raises(Interrupted) as caught:
        run(RunFolder(tmp_path, {}), signalled(at, signal.SIGINT))
    assert (caught.value.step, looks) == (step, [])
    found = run(RunFolder(tmp_path, {}))
    assert looks == expected
    assert found.watches == whole.watches
    assert torch.equal(found.losses, whole.losses)


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST", 0.01)
    folder, model = RunFolder(tmp_path, {}), small()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(model, loss=signalled(2, signal.SIGINT, signal.SIGINT, later=0.05)(model), folder=folder, steps=5)
    assert not isinstance(caught.value, Interrupted)
    assert folder.state() is None


def test_a_run_without_a_folder_is_interrupted_at_once() -> None:
    model = small()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(model, loss=signalled(2, signal.SIGINT)(model), steps=5)
    assert not isinstance(caught.value, Interrupted)


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


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    fit(folder=RunFolder(tmp_path, {"sigma": 0.5, "seed": 1}), steps=1)
    with pytest.raises(UsageError, match=re.escape("(sigma was 0.5, now 0.7); give the same, or another --out")):
        RunFolder(tmp_path, {"sigma": 0.7, "seed": 1}).load()


def test_a_checkpoint_caught_between_two_renames_is_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    fit(folder=folder, steps=2)
    (tmp_path / "checkpoints" / "last").rename(tmp_path / "checkpoints" / ".last.mmdgs-old")
    assert RunFolder(tmp_path, {}).load().state["step"] == 2


def test_metrics_with_a_last_line_cut_short(tmp_path: Path) -> None:
    fit(folder=RunFolder(tmp_path, {}), steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    fit(folder=RunFolder(tmp_path, {}), steps=5)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]


# --- validation -------------------------------------------------------------------------------------------------


def validated(
    batch_size: int = 12, folder: RunFolder | None = None, **changes: object
) -> tuple[Trained, list[tuple[float, int, Tensor]], Model]:
    """Train with validation; also what was kept as best: value, step and the network's first weights."""
    model = small("score")
    best: list[tuple[float, int, Tensor]] = []

    class Best:
        def keep(self, what: str, value: float, step: int, seconds: float) -> None:
            assert what == "validation loss"
            best.append((value, step, model.network.first.weight.detach().clone()))

    validation = Validation(ImageExamples(random_images(17, seed=9)), loss_of(model))
    trainer = Trainer(
        model.network,
        loss_of(model),
        ImageExamples(IMAGES),
        settings(batch_size=batch_size, **changes),
        validation=validation,
        best=Best(),
        folder=folder,
    )
    return trainer.run(None), best, model


def test_validation_is_of_the_average_with_the_same_noise_every_time() -> None:
    # At a rate this small nothing moves: every validation must give the same number, without dropout.
    found, _, model = validated(steps=6, validate_every=2, ema=0.9, learning_rate=1e-12)
    assert [step for step, _ in found.validations] == [2, 4, 6]
    assert len({round(value, 5) for _, value in found.validations}) == 1
    # By hand, in one batch: the noise is that of the rows, not of the batches.
    streams = Streams(0, 17, purpose="validation")
    x = ImageExamples(random_images(17, seed=9)).take(torch.arange(17), streams)
    with torch.no_grad():
        expected = loss_of(model)(x, streams).mean().item()
    assert found.validations[-1][1] == pytest.approx(expected, rel=1e-5)
    # At a large rate the network ends with its average: the last number is that of the weights it has now.
    found, _, model = validated(steps=6, validate_every=2, ema=0.9, learning_rate=0.03)
    streams = Streams(0, 17, purpose="validation")
    x = ImageExamples(random_images(17, seed=9)).take(torch.arange(17), streams)
    with torch.no_grad():
        expected = loss_of(model)(x, streams).mean().item()
    assert found.validations[-1][1] == pytest.approx(expected, rel=1e-5)
    assert found.validations[0][1] != pytest.approx(expected, rel=1e-3)


def test_validation_has_the_same_levels_every_time() -> None:
    model = many_levels()
    loss = loss_of(model, weighting="edm")
    validation = Validation(ImageExamples(random_images(17, seed=9)), loss)
    changes = settings(steps=6, validate_every=2, learning_rate=1e-12)
    found = Trainer(model.network, loss, ImageExamples(IMAGES), changes, validation=validation).run(None)
    assert len({round(value, 4) for _, value in found.validations}) == 1
    assert found.losses.std() > 1e-2 * found.losses.mean()


def test_validation_does_not_change_the_run() -> None:
    often, _, _ = validated(steps=6, validate_every=1, ema=0.9, learning_rate=0.01)
    once, _, _ = validated(steps=6, validate_every=None, ema=0.9, learning_rate=0.01)
    assert torch.equal(often.losses, once.losses)
    assert len(once.validations) == 1


def test_the_best_is_the_lowest_and_holds_the_averaged_weights() -> None:
    found, best, model = validated(steps=12, validate_every=2, ema=0.5, learning_rate=0.05)
    values = [value for _, value in found.validations]
    assert min(values) != values[-1] or len(best) > 1
    lows = [(value, step) for i, (step, value) in enumerate(found.validations) if value < min([math.inf, *values[:i]])]
    assert [(value, step) for value, step, _ in best] == lows
    if best[-1][1] == 12:
        assert torch.equal(best[-1][2], model.network.first.weight)


def test_a_run_that_goes_on_keeps_a_best_model_from_before(tmp_path: Path) -> None:
    _, before, _ = validated(folder=RunFolder(tmp_path, {}), steps=2, validate_every=1, learning_rate=0.01)
    # The second half makes everything worse: all that is best was kept in the first.
    found, after, _ = validated(folder=RunFolder(tmp_path, {}), steps=4, validate_every=1, learning_rate=3.0)
    values = [value for _, value in found.validations]
    assert len(values) == 4
    assert min(values[2:]) > min(values[:2])
    assert min(value for value, _, _ in before) == min(values)
    assert after == []


# --- precision and dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("param", ["energy", "mean-std"])
def test_bf16_runs_on_a_cpu_and_is_near_float32(param: str) -> None:
    exact, _ = fit(small(param, dropout=0.0))
    rough, model = fit(small(param, dropout=0.0), precision="bf16")
    assert all(p.dtype == torch.float32 for p in model.network.parameters())
    assert not torch.equal(rough.losses, exact.losses)
    # Eight bits of precision in each product, and three steps.
    torch.testing.assert_close(rough.losses, exact.losses, rtol=0.1, atol=0)


def test_tf32_is_asked_for_during_the_run_only() -> None:
    during = []

    def loss(network: Weight, x: Tensor) -> Tensor:
        during.append(torch.get_float32_matmul_precision())
        return linear(network, x)

    before = torch.get_float32_matmul_precision()
    fit_weight(loss, steps=1, precision="tf32")
    assert during == ["high"]
    assert torch.get_float32_matmul_precision() == before


def test_dropout_has_the_keys_of_the_rows_own_streams() -> None:
    # One dropout layer on ones: the loss is the share kept, from keys that are the rows' first uniform numbers.
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.dropout = RowDropout(0.5, 0)

    network, seen = Dropping(), []

    def loss(x: Tensor, generator: Generator) -> Tensor:
        seen.append(network.dropout.keys.clone())
        return (network.dropout(torch.ones(len(x), 64)) * network.scale).sum(1)

    Trainer(network, loss, TensorExamples(torch.zeros(8, 1)), settings(steps=2, batch_size=8)).run(None)
    streams = Streams(child_seed(0, "run 0"), 8, purpose="noise")
    for keys in seen:
        assert torch.equal(keys, (uniforms((8, 1), torch.empty(()), streams)[:, 0] * 2**24).long())
    assert not torch.equal(seen[0], seen[1])
    assert network.dropout.keys is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "say when training ends: steps, epochs or minutes"),
        ({"precision": "fp8"}, "precision must be one of float32, tf32, bf16, got 'fp8'"),
        ({"optimiser": "sgd"}, "unknown optimiser 'sgd'; choose one of adam, muon"),
        ({"ema": 1.0}, "ema must lie between 0 and 1, got 1.0"),
        ({"warmup": -1}, "warmup must not be negative, got -1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, or none, got 0"),
        ({"validate_every": -3}, "validate_every must be at least 1, or none, got -3"),
        ({"clip": 0.0}, "clip must be positive and finite, got 0.0"),
        ({"epochs": math.nan}, "epochs must be positive and finite, got nan"),
        ({"minutes": -1.0}, "minutes must be positive and finite, got -1.0"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        settings(**changes)


def test_the_network_stays_on_the_device_of_the_data(monkeypatch) -> None:
    # One process may train on another GPU than the first, which is the one accelerate would take.
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "device", property(lambda self: torch.device("meta")))
    model = small()
    trainer = Trainer(model.network, loss_of(model), ImageExamples(IMAGES), SETTINGS, accelerator=accelerator)
    found = trainer.run(None)
    plain, _ = fit()
    assert torch.equal(found.losses, plain.losses)
