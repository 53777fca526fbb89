"""Samplers side by side: the same model, seed and number of levels; frames as they come, evaluations counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from mmdgs.cost import counting
from mmdgs.data.pictures import image_grid, png
from mmdgs.errors import UsageError, unknown_name
from mmdgs.generation.engine import generate
from mmdgs.generation.methods import make_plan
from mmdgs.generation.settings import Method
from mmdgs.models import Model
from mmdgs.studio.downloads import bundle, npz

WORDS = {
    "gibbs": "Gibbs (the paper's)",
    "langevin": "annealed Langevin",
    "ancestral": "ancestral",
    "heun": "Heun (EDM)",
    "multistep": "multistep",
}
MOST_COUNT, MOST_STEPS = 9, 100
COUNT, STEPS = 4, 10
OPTIONS: dict[str, dict[str, Any]] = {
    "gibbs": {"covariance": "spectral", "sweeps": 2},
    "langevin": {"sweeps": 2},
    "ancestral": {"covariance": "spectral"},
    "heun": {},
    "multistep": {},
}
"""What is set of each sampler for a model of many levels, besides the number of levels."""


@dataclass(frozen=True)
class Wanted:
    """What is asked: samplers by name, so many samples of each, along so many levels (sweeps of a model of one)."""

    model: str
    samplers: tuple[str, ...]
    count: int = COUNT
    steps: int = STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.samplers:
            raise UsageError("choose at least one sampler")
        for one in self.samplers:
            if one not in WORDS:
                raise unknown_name("sampler", one, WORDS)
        for name, value, least, most in (("samples", self.count, 1, MOST_COUNT), ("steps", self.steps, 2, MOST_STEPS)):
            if not least <= value <= most:
                raise UsageError(f"{name} must be {least} to {most} here, got {value}; the command takes more")


@dataclass(frozen=True)
class Frame:
    """Where a sampler is: states (n, C, H, W) made visible, step and steps, and evaluations so far for each sample."""

    sampler: str
    x: Tensor
    step: int
    steps: int
    evaluations: float
    seconds: float = 0.0


def takes(model: Model, sampler: str) -> bool:
    """Whether a sampler works with a model: one of a single level has Gibbs alone."""
    return len(model.levels) > 1 or sampler == "gibbs"


def method_of(model: Model, sampler: str, steps: int) -> Method:
    """The settings of a sampler by name for a model."""
    if len(model.levels) == 1:
        return Method(sampler=sampler, steps=steps)
    return Method(sampler=sampler, steps=steps, **OPTIONS[sampler])


def shown_state(x: Tensor, spread: float) -> Tensor:
    """States in [0, 1] units that hold noise of this spread, with their contrast brought to what can be seen."""
    return 0.5 + (x - 0.5) / (1 + 2 * spread)


def sampled(
    model: Model,
    wanted: Wanted,
    *,
    tell: Callable[[dict[str, Frame]], Any] = lambda found: None,
    due: Callable[[], bool] = lambda: False,
) -> dict[str, Frame]:
    """The samples of each sampler, one after another; `tell` hears of all frames so far whenever `due`."""
    frames: dict[str, Frame] = {}
    low, high = model.interval
    for sampler in wanted.samplers:
        plan = make_plan(method_of(model, sampler, wanted.steps), model)
        with counting() as cost:

            def note(step: int, state: Any, info: Any, first: int) -> None:
                if not due():
                    return
                following = plan.steps[step].following  # noqa: B023  called before the loop goes on
                spread = following.ratio / (high - low)
                x = shown_state((state.x.cpu() - low) / (high - low), spread)
                frames[sampler] = Frame(sampler, x, step + 1, len(plan.steps), cost.evaluations)  # noqa: B023
                tell(dict(frames))

            made = generate(model, plan, wanted.count, seed=wanted.seed, callback=note, progress=None)
        assert made.x is not None
        steps = len(plan.steps)
        frames[sampler] = Frame(sampler, made.x, steps, steps, made.cost.evaluations, made.seconds)
        tell(dict(frames))
    return frames


def pictures(frames: dict[str, Frame]) -> list[tuple[str, numpy.ndarray]]:
    """A grid of samples for each sampler, with where it is."""
    found = []
    for frame in frames.values():
        where = "done" if frame.step == frame.steps else f"step {frame.step} of {frame.steps}"
        words = f"{WORDS[frame.sampler]}: {where}, {frame.evaluations:g} evaluations a sample"
        words += f", {frame.seconds:.1f} s" if frame.seconds else ""
        grid = image_grid(frame.x)
        found.append((words, grid if grid.ndim == 3 else numpy.repeat(grid[..., None], 3, 2)))
    return found


def download(frames: dict[str, Frame], wanted: Wanted, model: Model) -> bytes:
    """A zip of the samples, a picture for each sampler, and the lines that make them again."""
    python, command = lines(wanted, model)
    finished = {name: frame for name, frame in frames.items() if frame.step == frame.steps}
    files = {"samples.npz": npz({name: frame.x.numpy() for name, frame in finished.items()})}
    files |= {f"{name}.png": png(image_grid(frame.x), 3) for name, frame in finished.items()}
    files |= {"again.py": (python + "\n").encode(), "again.txt": (command + "\n").encode()}
    return bundle("samples", files)


def lines(wanted: Wanted, model: Model) -> tuple[str, str]:
    """The Python lines and the commands that give the same."""
    settings = {name: _options(method_of(model, name, wanted.steps)) for name in wanted.samplers}
    methods = ",\n    ".join(
        f"mmdgs.Method({', '.join(f'{key}={value!r}' for key, value in given.items())})" for given in settings.values()
    )
    python = f"""import mmdgs

model = mmdgs.load("{wanted.model}")
methods = [
    {methods},
]
for method in methods:
    found = mmdgs.generate(model, method, {wanted.count}, seed={wanted.seed})
    print(method.sampler, found.cost, found.x)"""
    commands = [
        f"mmdgs sample {wanted.model} {' '.join(f'--{key} {value}' for key, value in given.items())} -n {wanted.count} "
        f"--seed {wanted.seed} --out {name}.png"
        for name, given in settings.items()
    ]
    return python, "\n".join(commands)


def _options(method: Method) -> dict[str, Any]:
    return {key: value for key, value in vars(method).items() if value is not None}
