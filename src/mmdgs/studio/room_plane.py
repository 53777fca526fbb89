"""The room of the plane: click a noisy point, see its posterior; run chains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from mmdgs.studio import plane
from mmdgs.studio.controls import LIGHT, WORDS, Changes, Room, plainly
from mmdgs.studio.downloads import Folder, bundle
from mmdgs.studio.pictures import bars, figures

ABOUT = """A point was drawn from the blue density, and noise was added to it: it arrived at the green cross. Where did
it come from? **Click anywhere** to move the cross. The true answer, p(x | noisy x), is a density of its own; a Gaussian
(orange: half of it, and 95%) is what a denoiser's derivative gives. KL says how far it is from the truth."""
FIRST = ("mog", 0.3, (0.2, 0.1))


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
    room = Room("plane", folder)
    gr.Markdown(ABOUT)
    name, sigma, point = FIRST
    seen = plane.look(name, sigma, point)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picture = gr.Image(
                plane.main_picture(name, point),
                label="Click a noisy point",
                format="png",
                image_mode="RGBA",
                interactive=False,
                buttons=[],
                elem_id="plane-picture",
                elem_classes="mm-plane",
            )
        with gr.Column(scale=3, min_width=300):
            with gr.Row():
                density = gr.Dropdown(
                    [(words, one) for one, words in plane.DENSITIES.items()],
                    value=name,
                    label="Density",
                    elem_id="plane-density",
                    min_width=WORDS,
                )
                noise = gr.Slider(
                    plane.LEAST_SIGMA, plane.MOST_SIGMA, sigma, step=0.05, label="Noise (sigma)", elem_id="plane-sigma"
                )
            with gr.Row():
                x = gr.Number(point[0], label="Noisy point: x", step=0.1, elem_id="plane-x", min_width=100)
                y = gr.Number(point[1], label="y", step=0.1, elem_id="plane-y", min_width=100)
            panels = gr.HTML(figures(seen.panels(), wide=True), elem_id="plane-panels")
    gr.Markdown(
        "### Chains\nAdd noise, draw from the posterior, again and again: pseudo-Gibbs sampling of the density."
    )
    with gr.Row():
        method = gr.Dropdown(
            [(words, one) for one, words in plane.METHODS.items()],
            value="full",
            label="Draw from",
            elem_id="plane-method",
            min_width=WORDS,
        )
        count = gr.Slider(50, 900, 300, step=50, label="Chains", elem_id="plane-chains")
        steps = gr.Slider(10, 900, 200, step=10, label="Steps", elem_id="plane-steps")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="plane-seed", min_width=80)
    room.buttons("Run chains")
    room.status_line()
    weights = gr.HTML(elem_id="plane-weights")
    room.lines_boxes(*plane.look_lines(name, sigma, point))

    def shown(name: str, sigma: float, x: float, y: float) -> Changes:
        point = (round(float(x or 0), 4), round(float(y or 0), 4))
        found = plane.look(name, float(sigma), point)
        return {
            picture: plane.main_picture(name, point),
            panels: figures(found.panels(), wide=True),
            **room.lines(plane.look_lines(name, float(sigma), point)),
            **room.ready("plane.zip", bundle("plane", found.files())),
        }

    def click(name: str, sigma: float, event: gr.SelectData) -> Changes:
        at = plane.clicked(event.index)
        return {x: at[0], y: at[1], **shown(name, sigma, *at)}

    def mix(
        name: str, sigma: float, method: str, count: int, steps: int, seed: int, request: gr.Request
    ) -> Iterator[Changes]:
        settings = (name, method, float(sigma), int(count), int(steps), int(seed or 0))
        yield {**room.starting(), **room.lines(plane.chain_lines(*settings))}

        def work(tell: Any) -> None:
            tell(
                plane.chains(
                    *settings[:3], count=settings[3], steps=settings[4], seed=settings[5], tell=tell, due=tell.due
                )
            )

        for found in room.told(request, work):
            words = f"Step {found.step} of {settings[4]}, MMD {found.mmd:.4f} (0: the chains are like fresh data)."
            changes = {room.status: words, picture: plane.main_picture(name, dots=found.x), weights: bars(found.shares)}
            if found.step == settings[4]:
                changes |= room.ready("chains.zip", bundle("chains", found.files()))
            yield changes

    looked = [picture, panels, room.python, room.command, room.download]
    given = [density, noise, x, y]
    picture.select(plainly(click), [density, noise], [x, y, *looked], **LIGHT)
    for control in (density, noise):
        control.change(plainly(shown), given, looked, trigger_mode="always_last", **LIGHT)
    for control in (x, y):
        control.submit(plainly(shown), given, looked, api_name="look", **LIGHT)
        control.blur(plainly(shown), given, looked, **LIGHT)
    room.runs(mix, [density, noise, method, count, steps, seed], [picture, weights])
