"""The room of an image: its posterior, and components that are walked along by sliders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from mmdgs.generation.posterior_page import WORDS
from mmdgs.generation.posteriors import ImagePosterior
from mmdgs.studio import image
from mmdgs.studio.controls import (
    LIGHT,
    STOPPED,
    buttons,
    image_chooser,
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
from mmdgs.studio.sources import chosen_image, examples, model_of, models

ABOUT = """A denoiser returns one image, and many could have given the same noisy one. Here is what it knows (what all
draws share) and what it invents (what differs from draw to draw), and the directions in which it is least certain."""


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
    names = models()
    gr.Markdown(ABOUT)
    stored = gr.State(None)
    corner = gr.State(None)
    region = gr.State(None)
    found = gr.State(None, time_to_live=1800)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model, chosen, file, fit = image_chooser("image", names)
            kind = gr.Radio(
                [("clean: add noise first", True), ("noisy already", False)],
                value=True,
                label="The image is",
                elem_id="image-kind",
            )
            with gr.Row():
                sigma = gr.Slider(
                    0.02,
                    1.0,
                    image.SIGMAS[names[0]],
                    step=0.01,
                    label="Noise (sigma, for 0 to 1)",
                    elem_id="image-sigma",
                )
                estimate = gr.Checkbox(False, label="Estimate sigma", elem_id="image-estimate", min_width=120)
            go, stop, download = buttons("image", "Show the posterior")
            with gr.Accordion("More settings", open=False, elem_id="image-more"):
                draws = gr.Slider(0, image.MOST_DRAWS, image.DRAWS, step=1, label="Draws", elem_id="image-draws")
                components = gr.Slider(
                    0, image.MOST_COMPONENTS, image.COMPONENTS, step=1, label="Components", elem_id="image-components"
                )
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="image-seed", min_width=80)
            with gr.Accordion("Components of a part: click two corners", open=False, elem_id="image-part"):
                picture = gr.Image(
                    label="The image", interactive=False, buttons=[], format="png", elem_id="image-region", height=260
                )
                with gr.Row():
                    where = gr.Markdown("The whole image.", elem_id="image-where")
                    whole = gr.Button("Whole image", size="sm", elem_id="image-whole", min_width=100)
        with gr.Column(scale=3, min_width=300):
            status = status_line("image", "Choose an image, then show its posterior.")
            pictures = gr.HTML(elem_id="image-pictures")
            with gr.Column(visible=False, elem_id="image-walk") as walk:
                gr.Markdown("**Walk along the components**, in standard deviations from the mean.")
                moved = gr.HTML(elem_id="image-moved")
                sliders = [
                    gr.Slider(
                        -image.WALK, image.WALK, 0, step=0.1, label=f"Component {i + 1}", elem_id=f"image-walk-{i + 1}"
                    )
                    for i in range(image.MOST_COMPONENTS)
                ]
                changes = gr.HTML(elem_id="image-changes")
            python, command = lines_boxes("image")

    def look(model: str, chosen: str, file: str | None, fit: str) -> tuple[Any, ...]:
        """The image that was chosen; the region is the whole again."""
        now = chosen_image(model, chosen, file, fit)
        return now, None, None, image.region_picture(now, None, None), "The whole image."

    def other_model(model: str) -> tuple[Any, ...]:
        names = examples(model)
        single = len(model_of(model).levels) == 1
        level = gr.Slider(value=image.SIGMAS[model], interactive=not single)
        return gr.Dropdown(names, value=names[0]), level, gr.Checkbox(False, interactive=not single)

    def click(stored: Any, corner: Any, event: gr.SelectData) -> tuple[Any, ...]:
        at = image.pixel_at(stored, event.index)
        if corner is None:
            picture = image.region_picture(stored, None, at)
            return at, None, picture, f"One corner at {at[0]}, {at[1]}: click the other."
        region = image.region_between(corner, at)
        x, y, w, h = region
        return None, region, image.region_picture(stored, region, None), f"{w} x {h} pixels from {x}, {y}."

    def show(
        stored: Any, model: str, chosen: str, file: Any, fit: str, kind: bool, sigma: float, estimate: bool,
        draws: int, components: int, region: Any, seed: int, request: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        if stored is None:
            stored = plainly(chosen_image)(model, chosen, file, fit)
        level = None if estimate else float(sigma)
        wanted = plainly(image.Wanted)(
            model, level, bool(kind), int(draws), int(components), region and tuple(region), int(seed or 0)
        )
        yield _update(status="Starting ...", download=gr.DownloadButton(interactive=False))

        def work(tell: Any) -> None:
            tell(("done", image.posterior_of(model_of(model), stored, wanted, tell=tell)))

        for told_now in told("image", request, work):
            if told_now is None:
                yield _update()
            elif isinstance(told_now, ImagePosterior):
                yield _update(status="The mean is there; draws and components follow.", pictures=_shown(told_now))
            elif told_now[0] != "done":
                yield _update(status=f"{told_now[0]} of {told_now[1]} parts are done.")
            else:
                yield _finished(told_now[1], stored, wanted)
        if was_stopped("image", request):
            yield _update(status=STOPPED)

    def _finished(seen: ImagePosterior, stored: Any, wanted: image.Wanted) -> tuple[Any, ...]:
        lines = image.lines(wanted, seen.sigma)
        count = len(seen.directions)
        return _update(
            status=_words(seen),
            pictures=_shown(seen),
            found=seen,
            walk=gr.Column(visible=count > 0),
            moved=figures([("the mean", image.moved(seen, [0.0] * count))]),
            changes=figures(image.component_pictures(seen)),
            python=lines[0],
            command=lines[1],
            download=ready(folder, "posterior.zip", image.download(seen, stored, wanted)),
            sliders=[gr.Slider(value=0, visible=i < count) for i in range(len(sliders))],
        )

    def walked(seen: ImagePosterior | None, *steps: float) -> Any:
        if seen is None:
            return gr.skip()
        words = ", ".join(f"{one:+.1f}" for one in steps[: len(seen.directions)])
        return figures(
            [(f"the mean, {words} standard deviations" if any(steps) else "the mean", image.moved(seen, steps))]
        )

    outputs = [status, pictures, found, walk, moved, changes, python, command, download, *sliders]
    source = [model, chosen, file, fit]
    looked = [stored, corner, region, picture, where]
    model.change(plainly(other_model), model, [chosen, sigma, estimate], **LIGHT).then(
        plainly(look), source, looked, **LIGHT
    )
    for event in (chosen.input, file.change, fit.input):
        event(plainly(look), source, looked, **LIGHT)
    whole.click(plainly(look), source, looked, **LIGHT)
    picture.select(plainly(click), [stored, corner], [corner, region, picture, where], **LIGHT)
    given = [stored, *source, kind, sigma, estimate, draws, components, region, seed]
    runs("image", go, stop, status, show, given, outputs)
    for slider in sliders:
        slider.input(plainly(walked), [found, *sliders], moved, trigger_mode="always_last", **LIGHT)
    page = gr.context.Context.root_block
    assert page is not None
    page.load(plainly(look), source, looked, **LIGHT)


def _update(sliders: Any = None, **given: Any) -> tuple[Any, ...]:
    """Values for the outputs that are named, in their order; the others stay."""
    names = ["status", "pictures", "found", "walk", "moved", "changes", "python", "command", "download"]
    return (*(given.get(name, gr.skip()) for name in names), *(sliders or [gr.skip()] * image.MOST_COMPONENTS))


def _shown(seen: ImagePosterior) -> str:
    return figures(image.pictures(seen))


def _words(seen: ImagePosterior) -> str:
    cost = seen.cost
    found = [f"Done: {cost.forwards:,} evaluations and {cost.products:,} Jacobian products."]
    found += [f"{WORDS[name]}: {value:.3g}." for name, value in seen.scores.items() if name.startswith("psnr")]
    return " ".join([*found, *seen.remarks])
