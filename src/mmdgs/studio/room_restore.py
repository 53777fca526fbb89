"""The room of restoration: a degradation, or a painted mask, and draws as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
import numpy
from fastapi import HTTPException
from gradio.components.base import server

from mmdgs.generation.posterior_pictures import enlarged, pixels
from mmdgs.studio import restoring
from mmdgs.studio.controls import LIGHT, Changes, Room, image_chooser, plainly
from mmdgs.studio.downloads import Folder
from mmdgs.studio.pictures import figures
from mmdgs.studio.restoring import OPERATORS, PAINTED, STRENGTHS
from mmdgs.studio.sources import chosen_image, examples, in_units, model_of, models

ABOUT = """Part of an image is missing, blurred or too coarse. Many images explain what is left: each draw is one of
them, their mean is the best single guess, and where they differ nothing was known."""
CANVAS = 384
"""Pixels a side of the picture that is painted on."""


PAINTINGS, LAYERS = 64, 4
"""Paintings that wait for their run, and the layers of one."""


_accept_blobs = gr.ImageEditor.accept_blobs


def accept_blobs(editor: gr.ImageEditor, data: Any) -> None:
    """Gradio's editor would keep every painting that is sent, with as many layers as it says.

    Set on Gradio's class: a class of our own would make Gradio write a file beside this one.
    """
    if str(data.data.get("index", "null")) not in ("", "null", *map(str, range(LAYERS))):
        raise HTTPException(413, f"a painting has at most {LAYERS} layers")
    _accept_blobs(editor, data)
    while len(editor.blob_storage) > PAINTINGS:
        editor.blob_storage.pop(next(iter(editor.blob_storage)))


gr.ImageEditor.accept_blobs = server(accept_blobs)


def build(folder: Folder) -> None:
    """Add the room to the page that is being built."""
    room = Room("restore", folder)
    names = models(many_levels=True)
    gr.Markdown(ABOUT)
    first = next(iter(OPERATORS))
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model, chosen, file, fit = image_chooser("restore", names)
            kind = gr.Dropdown(list(OPERATORS), value=first, label="What happened to it", elem_id="restore-kind")
            strengths = {
                short: gr.Slider(
                    least, most, value, step=step, label=restoring.WORDS[short], visible=short == OPERATORS[first],
                    elem_id=f"restore-{short}",
                )
                for short, (least, most, value, step) in STRENGTHS.items()
            }  # fmt: skip
            with gr.Group(visible=False, elem_id="restore-painting") as painting:
                painted = gr.ImageEditor(
                    label="Paint over what is to be restored",
                    type="numpy",
                    layers=False,
                    sources=(),
                    transforms=(),
                    brush=gr.Brush(colors=["#ff2f6d"], default_size=36, color_mode="fixed"),
                    eraser=gr.Eraser(default_size=36),
                    canvas_size=(CANVAS, CANVAS),
                    fixed_canvas=True,
                    buttons=[],
                    format="png",
                    height=440,
                    elem_id="restore-paint",
                )
                damaged = gr.Checkbox(False, label="It is damaged already: add no noise", elem_id="restore-damaged")
            noise = gr.Slider(
                0.01, 0.3, restoring.NOISE, step=0.01, label="Noise (std, for values 0 to 1)", elem_id="restore-noise"
            )
            room.buttons("Restore")
            with gr.Accordion("More settings", open=False, elem_id="restore-more"):
                draws = gr.Slider(
                    1, restoring.MOST_DRAWS, restoring.DRAWS, step=1, label="Draws", elem_id="restore-draws"
                )
                steps = gr.Slider(
                    5, restoring.MOST_STEPS, restoring.STEPS, step=1, label="Steps of each", elem_id="restore-steps"
                )
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="restore-seed", min_width=80)
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image and what happened to it, then restore it.")
            pictures = gr.HTML(elem_id="restore-pictures")
            room.lines_boxes()

    def other_kind(kind: str, model: str, chosen: str, file: str | None, fit: str) -> Changes:
        changes: Changes = {one: gr.update(visible=short == OPERATORS[kind]) for short, one in strengths.items()}
        changes[painting] = gr.update(visible=kind == PAINTED)
        if kind == PAINTED:
            picture = enlarged(pixels(in_units(chosen_image(model, chosen, file, fit))), CANVAS)
            changes[painted] = {"background": picture, "layers": [], "composite": None}
        return changes

    def other_model(model: str) -> Changes:
        names = examples(model)
        return {chosen: gr.update(choices=names, value=names[0])}

    def show(
        model: str, chosen: str, file: Any, fit: str, kind: str, box: float, random: float, sr: float, blur: float,
        motion: float, paint: Any, damaged: bool, noise: float, draws: int, steps: int, seed: int, request: gr.Request,
    ) -> Iterator[Changes]:  # fmt: skip
        strength = dict(zip(STRENGTHS, (box, random, sr, blur, motion), strict=True)).get(OPERATORS.get(kind, ""))
        stored, wanted, mask = _asked(
            model, chosen, file, fit, kind, strength, paint, damaged, noise, draws, steps, seed
        )
        yield {**room.starting(), **room.lines(restoring.lines(wanted))}

        def work(tell: Any) -> None:
            tell(restoring.restored(model_of(model), stored, wanted, mask, tell=tell, due=tell.due))

        for seen in room.told(request, work):
            changes = {room.status: _words(seen), pictures: figures(restoring.pictures(seen))}
            if len(seen.draws) and seen.under_way is None:
                changes |= room.ready("restored.zip", restoring.download(seen, stored, wanted, mask))
            yield changes

    source = [model, chosen, file, fit]
    refreshed = [*strengths.values(), painting, painted]
    model.change(plainly(other_model), model, chosen, **LIGHT).then(
        plainly(other_kind), [kind, *source], refreshed, **LIGHT
    )
    for event in (kind.change, chosen.input, file.change, fit.input):
        event(plainly(other_kind), [kind, *source], refreshed, **LIGHT)
    room.runs(show, [*source, kind, *strengths.values(), painted, damaged, noise, draws, steps, seed], [pictures])


def _asked(
    model: str, chosen: str, file: Any, fit: str, kind: str, strength: float | None, paint: Any, damaged: bool,
    noise: float, draws: int, steps: int, seed: int,
) -> tuple[numpy.ndarray, restoring.Wanted, numpy.ndarray | None]:  # fmt: skip
    """The image, the settings and the mask, from the controls."""
    stored = chosen_image(model, chosen, file, fit)
    wanted = restoring.Wanted(
        model,
        restoring.operator_text(kind, strength),
        float(noise),
        int(draws),
        int(steps),
        int(seed or 0),
        clean=not (kind == PAINTED and damaged),
    )
    return stored, wanted, restoring.painted_mask(_alpha(paint), model_of(model).shape) if kind == PAINTED else None


def _alpha(paint: Any) -> numpy.ndarray | None:
    """What was painted, (rows, columns) from 0 to 255; None where nothing was."""
    layers = [layer[..., 3] for layer in (paint or {}).get("layers") or [] if layer.ndim == 3 and layer.shape[2] == 4]
    return numpy.max(layers, 0) if layers else None


def _words(seen: restoring.Drawn) -> str:
    done, total = seen.done
    if done < total:
        return f"{len(seen.draws)} draws are there; {100 * done // total}% is done."
    scores = seen.scores()
    found = [f"Done: {len(seen.draws)} draws."]
    if scores:
        found.append(f"PSNR of the mean: {scores['psnr_mean']:.1f} dB, of a draw: {scores['psnr_draw']:.1f} dB.")
    return " ".join(found)
