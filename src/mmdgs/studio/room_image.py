"""The room of an image: its posterior, and components that are walked along by sliders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from mmdgs.generation.posterior_page import WORDS
from mmdgs.generation.posteriors import ImagePosterior
from mmdgs.studio import image
from mmdgs.studio.controls import LIGHT, Changes, Room, image_chooser, plainly
from mmdgs.studio.downloads import Folder
from mmdgs.studio.pictures import figures
from mmdgs.studio.sources import chosen_image, example, examples, model_of, models

ABOUT = """A denoiser returns one image, and many could have given the same noisy one. Here is what it knows (what all
draws share) and what it invents (what differs from draw to draw), and the directions in which it is least certain."""
WHOLE = "The whole image."


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
    room = Room("image", folder)
    names = models()
    gr.Markdown(ABOUT)
    first = example(names[0], examples(names[0])[0])
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
            sigma = gr.Slider(
                0.02,
                1.0,
                image.SIGMAS[names[0]],
                step=0.01,
                label="Noise (std, for values 0 to 1)",
                elem_id="image-sigma",
            )
            estimate = gr.Checkbox(False, label="Estimate it from the image", elem_id="image-estimate")
            room.buttons("Show the posterior")
            with gr.Accordion("More settings", open=False, elem_id="image-more"):
                draws = gr.Slider(0, image.MOST_DRAWS, image.DRAWS, step=1, label="Draws", elem_id="image-draws")
                components = gr.Slider(
                    0, image.MOST_COMPONENTS, image.COMPONENTS, step=1, label="Components", elem_id="image-components"
                )
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="image-seed", min_width=80)
            with gr.Accordion("Components of a part: click two corners", open=False, elem_id="image-part"):
                picture = gr.Image(
                    image.region_picture(first, None, None),
                    label="The image",
                    interactive=False,
                    buttons=[],
                    format="png",
                    elem_id="image-region",
                    height=260,
                )
                with gr.Row():
                    where = gr.Markdown(WHOLE, elem_id="image-where")
                    whole = gr.Button("Whole image", size="sm", elem_id="image-whole", min_width=100)
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image, then show its posterior.")
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
            room.lines_boxes()

    def look(model: str, chosen: str, file: str | None, fit: str) -> Changes:
        """The image that was chosen; the region is the whole again."""
        now = chosen_image(model, chosen, file, fit)
        return {corner: None, region: None, picture: image.region_picture(now, None, None), where: WHOLE}

    def other_model(model: str) -> Changes:
        names, single = examples(model), len(model_of(model).levels) == 1
        return {
            chosen: gr.update(choices=names, value=names[0]),
            sigma: gr.update(value=image.SIGMAS[model], interactive=not single),
            estimate: gr.update(value=False, interactive=not single),
        }

    def click(first: Any, model: str, chosen: str, file: str | None, fit: str, event: gr.SelectData) -> Changes:
        now = chosen_image(model, chosen, file, fit)
        at = image.pixel_at(now, event.index)
        if first is None:
            words = f"One corner at {at[0]}, {at[1]}: click the other."
            return {corner: at, region: None, picture: image.region_picture(now, None, at), where: words}
        box = image.region_between(first, at)
        words = f"{box[2]} x {box[3]} pixels from {box[0]}, {box[1]}."
        return {corner: None, region: box, picture: image.region_picture(now, box, None), where: words}

    def show(
        model: str, chosen: str, file: Any, fit: str, kind: bool, sigma: float, estimate: bool, draws: int,
        components: int, region: Any, seed: int, request: gr.Request,
    ) -> Iterator[Changes]:  # fmt: skip
        stored = chosen_image(model, chosen, file, fit)
        level = None if estimate else float(sigma)
        wanted = image.Wanted(
            model, level, bool(kind), int(draws), int(components), region and tuple(region), int(seed or 0)
        )
        yield room.starting()

        def work(tell: Any) -> None:
            tell(("done", image.posterior_of(model_of(model), stored, wanted, tell=tell)))

        for told in room.told(request, work):
            if isinstance(told, ImagePosterior):
                yield {room.status: "The mean is there; draws and components follow.", pictures: _shown(told)}
            elif told[0] != "done":
                yield {room.status: f"{told[0]} of {told[1]} parts are done."}
            else:
                yield finished(told[1], stored, wanted)

    def finished(seen: ImagePosterior, stored: Any, wanted: image.Wanted) -> Changes:
        count = len(seen.directions)
        return {
            room.status: _words(seen),
            pictures: _shown(seen),
            found: seen,
            walk: gr.update(visible=count > 0),
            moved: figures([("the mean", image.moved(seen, [0.0] * count))]),
            changes: figures(image.component_pictures(seen)),
            **room.lines(image.lines(wanted, seen.sigma)),
            **room.ready("posterior.zip", image.download(seen, stored, wanted)),
            **{slider: gr.update(value=0, visible=i < count) for i, slider in enumerate(sliders)},
        }

    def walked(seen: ImagePosterior | None, *steps: float) -> Changes:
        if seen is None:
            return {moved: gr.update()}
        words = ", ".join(f"{one:+.1f}" for one in steps[: len(seen.directions)])
        words = f"the mean, {words} standard deviations" if any(steps) else "the mean"
        return {moved: figures([(words, image.moved(seen, steps))])}

    source = [model, chosen, file, fit]
    looked = [corner, region, picture, where]
    model.change(plainly(other_model), model, [chosen, sigma, estimate], **LIGHT).then(
        plainly(look), source, looked, **LIGHT
    )
    for event in (chosen.input, file.change, fit.input, whole.click):
        event(plainly(look), source, looked, **LIGHT)
    picture.select(plainly(click), [corner, *source], looked, **LIGHT)
    given = [*source, kind, sigma, estimate, draws, components, region, seed]
    room.runs(show, given, [pictures, found, walk, moved, changes, *sliders])
    for slider in sliders:
        slider.input(plainly(walked), [found, *sliders], moved, trigger_mode="always_last", **LIGHT)


def _shown(seen: ImagePosterior) -> str:
    return figures(image.pictures(seen))


def _words(seen: ImagePosterior) -> str:
    cost = seen.cost
    found = [f"Done: {cost.forwards:,} evaluations and {cost.products:,} Jacobian products."]
    found += [f"{WORDS[name]}: {value:.3g}." for name, value in seen.scores.items() if name.startswith("psnr")]
    return " ".join([*found, *seen.remarks])
