"""The room of samplers: the same seed, frames as they come, evaluations counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from mmdgs.studio import sampling
from mmdgs.studio.controls import LIGHT, Changes, Room, plainly
from mmdgs.studio.downloads import Folder
from mmdgs.studio.pictures import figures
from mmdgs.studio.sources import MANY_LEVELS, OWN, model_of, models

ABOUT = """From noise to images, with the same network and the same seed. Samplers differ in what they ask of the
network at each level of noise, and how often. A model of one noise level has Gibbs sampling alone."""


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
    room = Room("sampler", folder)
    names = sorted(models(), key=lambda name: name not in MANY_LEVELS)  # those with all samplers first
    gr.Markdown(ABOUT)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model = gr.Dropdown(
                [(f"{name} ({OWN[name]})", name) for name in names],
                value=names[0],
                label="Model",
                elem_id="sampler-model",
            )
            choices = _samplers(names[0])
            chosen = gr.CheckboxGroup(**choices, label="Samplers", elem_id="sampler-samplers")
            with gr.Row():
                count = gr.Slider(
                    1, sampling.MOST_COUNT, sampling.COUNT, step=1, label="Samples", elem_id="sampler-count"
                )
                steps = gr.Slider(
                    5,
                    sampling.MOST_STEPS,
                    sampling.STEPS,
                    step=1,
                    label="Levels",
                    elem_id="sampler-steps",
                )
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="sampler-seed", min_width=80)
            room.buttons("Sample")
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose samplers, then sample.")
            pictures = gr.HTML(elem_id="sampler-pictures")
            room.lines_boxes()

    def show(
        model: str, chosen: list[str], count: int, steps: int, seed: int, request: gr.Request
    ) -> Iterator[Changes]:
        wanted = sampling.Wanted(model, tuple(chosen), int(count), int(steps), int(seed or 0))
        found = model_of(model)
        yield {**room.starting(), **room.lines(sampling.lines(wanted, found))}

        def work(tell: Any) -> None:
            sampling.sampled(found, wanted, tell=tell, due=tell.due)

        for frames in room.told(request, work):
            done, total = sum(one.step == one.steps for one in frames.values()), len(wanted.samplers)
            words = "Done." if done == total else f"{done} of {total} samplers done."
            changes = {room.status: words, pictures: figures(sampling.pictures(frames), wide=True)}
            if done == len(frames):  # one has just ended
                changes |= room.ready("samples.zip", sampling.download(frames, wanted, found))
            yield changes

    def other_model(model: str) -> Changes:
        return {chosen: gr.update(**_samplers(model))}

    model.change(plainly(other_model), model, chosen, **LIGHT)
    room.runs(show, [model, chosen, count, steps, seed], [pictures])


def _samplers(model: str) -> dict[str, Any]:
    """The samplers that a model has: what can be chosen, and that all are."""
    found = [(words, name) for name, words in sampling.WORDS.items() if sampling.takes(model_of(model), name)]
    return {"choices": found, "value": [name for _, name in found]}
