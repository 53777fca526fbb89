"""Samplers side by side: one model, seed and number of levels; frames, and evaluations counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from mmdgs.cost import counting
from mmdgs.data.pictures import image_grid, png
from mmdgs.errors import UsageError, unknown_name
from mmdgs.models import Model
from mmdgs.sampling.engine import generate
from mmdgs.sampling.named import make_plan
from mmdgs.sampling.settings import SamplerSettings
from mmdgs.studio.folder import bundle
from mmdgs.studio.pictures import Captioned, figures, visible_state
from mmdgs.studio.sources import check_bounds, model_of, models
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell

SAMPLERS = {
    "gibbs": "Gibbs (the paper's)",
    "langevin": "annealed Langevin",
    "ancestral": "ancestral",
    "heun": "Heun (EDM)",
    "multistep": "multistep",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gibbs": {"covariance": "spectral", "sweeps": 2},
    "langevin": {"sweeps": 2},
    "ancestral": {"covariance": "spectral"},
}
"""What is set of samplers for a model of many levels, besides the number of levels."""
MOST_COUNT, MOST_STEPS = 9, 100
ABOUT = """From noise to images, with the same network and the same seed. Samplers differ in what
they ask of the network at each level of noise, and how often. A model of one noise level has Gibbs
sampling alone."""


@dataclass(frozen=True)
class Samples:
    """Samplers by name, samples of each, and levels (sweeps of a model of one level)."""

    model: str
    samplers: tuple[str, ...]
    count: int = 4
    steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.samplers:
            raise UsageError("choose at least one sampler")
        for sampler in self.samplers:
            if sampler not in SAMPLERS:
                raise unknown_name("sampler", sampler, SAMPLERS)
        check_bounds(samples=(self.count, 1, MOST_COUNT), steps=(self.steps, 2, MOST_STEPS))

    def settings(self, model: Model) -> dict[str, dict[str, Any]]:
        """What is set of each sampler, as SamplerSettings and the command take it."""
        options = OPTIONS if len(model.levels) > 1 else {}
        base = {"steps": self.steps}
        return {name: {"sampler": name, **base, **options.get(name, {})} for name in self.samplers}

    def lines(self, model: Model) -> tuple[str, str]:
        """The Python lines and the commands that give the same."""
        settings, commands = [], []
        for name, options in self.settings(model).items():
            arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
            settings.append(f"    mmdgs.SamplerSettings({arguments}),\n")
            words = " ".join(f"--{key} {value}" for key, value in options.items())
            command = f"mmdgs sample {self.model} {words} -n {self.count} --seed {self.seed}"
            commands.append(f"{command} --out {name}.png")
        python = f"""import mmdgs

model = mmdgs.load("{self.model}")
samplers = [
{"".join(settings)}]
for settings in samplers:
    samples = mmdgs.generate(model, settings, {self.count}, seed={self.seed})
    print(settings.sampler, samples.cost, samples.x)"""
        return python, "\n".join(commands)


@dataclass(frozen=True)
class Frame:
    """Where a sampler is: visible states (n, C, H, W), and evaluations so far for each sample."""

    x: Tensor
    step: int
    steps: int
    evaluations: float
    seconds: float = 0.0


Frames = dict[str, Frame]


def samplers_of(model: Model) -> dict[str, str]:
    """The samplers that a model can use, with words: one of a single level has Gibbs alone."""
    single = len(model.levels) == 1
    return {name: words for name, words in SAMPLERS.items() if name == "gibbs" or not single}


def sample(model: Model, request: Samples, tell: Tell[Frames] = QUIET) -> Frames:
    """The samples of each sampler, one sampler after another."""
    frames: Frames = {}
    low, high = model.interval
    for name, options in request.settings(model).items():
        if frames:
            tell(dict(frames))
        plan = make_plan(SamplerSettings(**options), model)
        with counting() as cost:

            def note(step: int, state: Any, info: Any, first: int) -> None:
                if tell.due():
                    spread = plan.steps[step].following.ratio / (high - low)  # noqa: B023
                    x = visible_state((state.x.cpu() - low) / (high - low), spread)
                    frame = Frame(x, step + 1, len(plan.steps), cost.evaluations)  # noqa: B023
                    tell({**frames, name: frame})  # noqa: B023  called before the loop goes on

            samples = generate(
                model, plan, request.count, seed=request.seed, callback=note, progress=None
            )
        assert samples.x is not None
        steps = len(plan.steps)
        frames[name] = Frame(samples.x, steps, steps, samples.cost.evaluations, samples.seconds)
    return frames


def pictures(frames: Frames) -> list[Captioned]:
    """A grid of samples for each sampler, with where it is."""
    shown = []
    for name, frame in frames.items():
        where = "done" if frame.step == frame.steps else f"step {frame.step} of {frame.steps}"
        words = f"{SAMPLERS[name]}: {where}, {frame.evaluations:g} evaluations a sample"
        words += f", {frame.seconds:.1f} s" if frame.seconds else ""
        grid = image_grid(frame.x)
        shown.append((words, grid if grid.ndim == 3 else numpy.repeat(grid[..., None], 3, 2)))
    return shown


def download(frames: Frames, lines: tuple[str, str]) -> bytes:
    """A zip of the samples, a picture for each sampler, and the lines that make them again."""
    files: dict[str, Any] = {
        "samples.npz": {name: frame.x.numpy() for name, frame in frames.items()}
    }
    files |= {f"{name}.png": png(image_grid(frame.x), 3) for name, frame in frames.items()}
    return bundle("samples", files, lines)


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""

    def choices(model: str) -> dict[str, Any]:
        samplers = samplers_of(model_of(model))
        pairs = [(words, name) for name, words in samplers.items()]
        return {"choices": pairs, "value": list(samplers)}

    names = models(sampling=True)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model = room.model(names)
            options = choices(names[0])
            samplers = room.control(gr.CheckboxGroup, "samplers", **options, label="Samplers")
            with gr.Row():
                room.slider("count", "Samples", 1, MOST_COUNT, Samples.count)
                room.slider("steps", "Levels", 5, MOST_STEPS, Samples.steps)
                room.seed()
            room.buttons("Sample")
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose samplers, then sample.")
            shown = room.place(gr.HTML, "pictures")
            room.lines_boxes()

    def prepare(samplers: list[str], **values: Any) -> Run:
        request = Samples(samplers=tuple(samplers), **values)
        network = model_of(request.model)
        lines = request.lines(network)

        def change(frames: Frames) -> Changes:
            done = sum(frame.step == frame.steps for frame in frames.values())
            total = len(request.samplers)
            words = "Done." if done == total else f"{done} of {total} samplers done."
            return {room.status: words, shown: figures(pictures(frames), wide=True)}

        def saved(frames: Frames) -> tuple[str, bytes]:
            return "samples.zip", download(frames, lines)

        return Run(lambda tell: sample(network, request, tell), change, saved, lines)

    room.on(
        [model.change], lambda model: {samplers: gr.update(**choices(model))}, [model], [samplers]
    )
    room.runs(prepare, [shown])
