"""The room of samplers: the same seed, frames as they come, evaluations counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from mmdgs.studio import sampling
from mmdgs.studio.controls import (
    LIGHT,
    STOPPED,
    buttons,
    lines_boxes,
    plainly,
    ready,
    runs,
    status_line,
    told,
    was_stopped,
)
from mmdgs.studio.downloads import Folder
from mmdgs.studio.pictures import figures
from mmdgs.studio.sources import MANY_LEVELS, OWN, model_of, models

ABOUT = """From noise to images, with the same network and the same seed. Samplers differ in what they ask of the
network at each level of noise, and how often. A model of one noise level has Gibbs sampling alone."""


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
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
            chosen = _samplers(names[0])
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
            go, stop, download = buttons("sampler", "Sample")
        with gr.Column(scale=3, min_width=300):
            status = status_line("sampler", "Choose samplers, then sample.")
            pictures = gr.HTML(elem_id="sampler-pictures")
            python, command = lines_boxes("sampler")

    def show(
        model: str, chosen: list[str], count: int, steps: int, seed: int, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        wanted = plainly(sampling.Wanted)(model, tuple(chosen), int(count), int(steps), int(seed or 0))
        found = plainly(model_of)(model)
        lines = plainly(sampling.lines)(wanted, found)
        yield "Starting ...", gr.skip(), *lines, gr.DownloadButton(interactive=False)

        def work(tell: Any) -> None:
            sampling.sampled(found, wanted, tell=tell, due=tell.due)

        for frames in told("sampler", request, work):
            if frames is None:
                yield (gr.skip(),) * 5
                continue
            done = [one for one in frames.values() if one.step == one.steps]
            file: Any = gr.skip()
            if len(done) == len(frames):  # one has just ended
                file = ready(folder, "samples.zip", sampling.download(frames, wanted, found))
            words = (
                "Done."
                if len(done) == len(wanted.samplers)
                else f"{len(done)} of {len(wanted.samplers)} samplers done."
            )
            yield words, figures(sampling.pictures(frames), wide=True), gr.skip(), gr.skip(), file
        if was_stopped("sampler", request):
            yield STOPPED, *(gr.skip(),) * 4

    model.change(plainly(_samplers), model, chosen, **LIGHT)
    given = [model, chosen, count, steps, seed]
    runs("sampler", go, stop, status, show, given, [status, pictures, python, command, download])


def _samplers(model: str) -> gr.CheckboxGroup:
    """The samplers that a model has."""
    found = [(words, name) for name, words in sampling.WORDS.items() if sampling.takes(model_of(model), name)]
    return gr.CheckboxGroup(found, value=[name for _, name in found], label="Samplers", elem_id="sampler-samplers")
