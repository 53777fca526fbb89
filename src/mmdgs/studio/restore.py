"""Restoration: an image is degraded or painted over; draws of p(x | y) are shown as they come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.operators import Mask, Operator
from mmdgs.operators.named import parse_operator
from mmdgs.restoration import draws as restoration
from mmdgs.restoration.folder import as_image, scores_of, simulated
from mmdgs.sampling.named import edm_levels
from mmdgs.studio import sources
from mmdgs.studio.folder import bundle, stored_picture
from mmdgs.studio.pictures import Captioned, figures, spread_picture, visible_state
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell
from mmdgs.uncertainty.pictures import enlarged, pixels

PAINTED, MASK = "paint a mask", "mask.png"
OPERATORS = {
    "a missing box": "box",
    "missing pixels": "random",
    "super-resolution": "sr",
    "blur": "blur",
    "motion blur": "motion",
    "grey to colour": "gray",
    PAINTED: MASK,
}
"""Degradations by what they are called in the room, and their names in commands."""
STRENGTHS: dict[str, tuple[str, float, float, float, float]] = {
    "box": ("side of the box (pixels)", 4, 24, 12, 1),
    "random": ("share that is missing", 0.1, 0.95, 0.7, 0.05),
    "sr": ("factor", 2, 8, 4, 2),
    "blur": ("std (pixels)", 0.5, 3, 1.5, 0.1),
    "motion": ("length (pixels)", 3, 15, 9, 2),
}
"""Label, least, most, first and step of each strength."""
MOST_DRAWS, MOST_STEPS = 8, 50
CANVAS = 384
"""Pixels a side of the picture that is painted on."""
ABOUT = """Part of an image is missing, blurred or too coarse. Many images explain what is left:
each draw is one of them, their mean is the best single guess, and where they differ nothing was
known."""


@dataclass(frozen=True)
class Restore:
    """What is asked: an operator as in commands (mask.png is painted); `clean`: degrade it."""

    model: str
    operator: str
    noise: float = 0.05
    draws: int = 4
    steps: int = 15
    seed: int = 0
    clean: bool = True

    def __post_init__(self) -> None:
        sources.check_bounds(draws=(self.draws, 1, MOST_DRAWS), steps=(self.steps, 2, MOST_STEPS))
        if not self.clean and self.operator != MASK:
            raise UsageError("a damaged image is restored under a painted mask alone")

    def lines(self) -> tuple[str, str]:
        """The Python lines and the command; the files they name are in the download."""
        python = f"""import numpy, torch
import mmdgs
from mmdgs.operators.named import parse_operator

model = mmdgs.load("{self.model}")
operator = parse_operator("{self.operator}", model.shape, seed={self.seed})
y = torch.from_numpy(numpy.load("measured.npy"))[None]
restored = mmdgs.restore(
    model, y, operator,
    noise={self.noise!r}, steps={self.steps}, draws={self.draws}, seed={self.seed},
)
print(restored.draws, restored.mean, restored.std)"""
        command = f"mmdgs restore {self.model} image.png --operator {self.operator}"
        command += f" --noise {self.noise:g}{' --simulate' if self.clean else ''}"
        command += f" --draws {self.draws} --steps {self.steps} --seed {self.seed} --out restored"
        return python, command


def operator_text(name: str, strengths: dict[str, float]) -> str:
    """The operator of a command, such as sr:4, from the room's controls."""
    if name not in OPERATORS:
        raise UsageError(f"choose one of {', '.join(OPERATORS)}, got {name!r}")
    short = OPERATORS[name]
    return f"{short}:{strengths[short]:g}" if short in STRENGTHS else short


def painted_mask(paint: Any, shape: tuple[int, ...]) -> numpy.ndarray:
    """Which pixels are measured (H, W), from the layers of a painting, RGBA of any size."""
    layers = [layer for layer in (paint or {}).get("layers") or [] if layer.shape[2:] == (4,)]
    alpha = numpy.max([layer[..., 3] for layer in layers], 0) if layers else numpy.zeros(1)
    if not alpha.any():
        raise UsageError("paint over the part of the image that is to be restored")
    strength = torch.from_numpy(alpha.astype(numpy.float32))[None, None]
    share = torch.nn.functional.interpolate(strength, shape[-2:], mode="area")[0, 0] / 255
    measured = (share < 0.25).numpy()  # a quarter of a pixel is enough: its colour would leak
    if not measured.any():
        raise UsageError("the whole image is painted over: leave some of it")
    return measured


@dataclass(frozen=True)
class Drawn:
    """Draws so far (n, C, H, W) in [0, 1] units, and those under way as noisy states."""

    truth: Tensor | None
    measurement: Tensor
    y: Tensor
    draws: Tensor
    under_way: Tensor | None = None
    done: tuple[int, int] = (0, 1)

    def summary(self) -> str:
        """How far it is, or how near the truth is where there is one."""
        done, total = self.done
        if done < total:
            return f"{len(self.draws)} draws are there; {100 * done // total}% is done."
        words = f"Done: {len(self.draws)} draws."
        if self.truth is not None:
            psnr = scores_of(self.draws[:, None], self.truth[None])
            words += f" PSNR of the mean: {psnr['psnr_mean']:.1f} dB, "
            words += f"of a draw: {psnr['psnr_draw']:.1f} dB."
        return words

    def pictures(self) -> list[Captioned]:
        """What is shown, with words."""
        count = len(self.draws)
        shown = [] if self.truth is None else [("the clean image", pixels(self.truth))]
        shown.append(("what was measured", pixels(self.measurement)))
        if count:
            shown.append((f"mean of {count} draws", pixels(self.draws.mean(0))))
        if count > 1:
            shown.append(spread_picture("where the draws differ", self.draws.std(0)))
        shown += [(f"draw {i}", pixels(draw)) for i, draw in enumerate(self.draws, 1)]
        states = () if self.under_way is None else self.under_way
        return shown + [
            (f"draw {i}, under way", pixels(x)) for i, x in enumerate(states, count + 1)
        ]


def restored(
    model: Model,
    stored: numpy.ndarray,
    request: Restore,
    mask: numpy.ndarray | None = None,
    tell: Tell[Drawn] = QUIET,
) -> Drawn:
    """Draws of an image given its measurement, under a painted mask (H, W) or the operator."""
    if mask is not None:
        operator: Operator = Mask(torch.from_numpy(mask), model.shape)
    else:
        operator = parse_operator(request.operator, model.shape, seed=request.seed)
    named = NamedImage("image", sources.in_units(stored))
    image, _ = named.in_channels(model.shape[0], clean=request.clean)
    x, (low, high) = image[None], model.interval
    y = simulated(x, operator, request.noise, seed=request.seed) if request.clean else operator(x)
    measurement, total = as_image(operator.known(y), image.shape)[0], request.draws * request.steps
    begun = Drawn(image if request.clean else None, measurement, y[0], x[:0], done=(0, total))

    shipped = sources.shipped_result(sources.key_of(request, model, stored, mask))
    if shipped is not None:
        draws = torch.from_numpy(shipped["draws"]).float()
        return replace(begun, draws=draws, done=(total, total))
    tell(begun)
    finished: list[Tensor] = []
    levels = edm_levels(model, request.steps)

    def note(step: int, state: Any, info: Any, first: int) -> None:
        last, states = step + 1 == request.steps, (state.x.cpu() - low) / (high - low)
        if last:
            finished.extend(states)
        if last or tell.due():
            ratio = 0 if last else levels[step + 1].ratio / (high - low)
            under_way = None if last else visible_state(states, ratio)
            draws = torch.stack(finished) if finished else x[:0]
            done = (first * request.steps + (step + 1) * len(states), total)
            tell(replace(begun, draws=draws, under_way=under_way, done=done))

    posterior = restoration.restore(
        model, y, operator, noise=request.noise, steps=request.steps, draws=request.draws,
        seed=request.seed, batch_size=2, progress=None, callback=note,
    )  # fmt: skip
    return replace(begun, draws=posterior.draws[:, 0], done=(total, total))


def download(
    drawn: Drawn, stored: numpy.ndarray, lines: tuple[str, str], mask: numpy.ndarray | None
) -> bytes:
    """A zip of the image, the measurement, the draws, and the lines that make them again."""
    mean = drawn.draws.mean(0)
    files = {
        "image.png": stored_picture(stored),
        "measured.npy": drawn.y.numpy(),
        "draws.npz": {"draws": drawn.draws.numpy(), "mean": mean.numpy()},
        "mean.png": pixels(mean),
    }
    files |= {f"draw-{i}.png": pixels(draw) for i, draw in enumerate(drawn.draws, 1)}
    files |= {} if mask is None else {MASK: (mask * 255).astype(numpy.uint8)}
    return bundle("restored", files, lines)


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""
    first = next(iter(OPERATORS.values()))
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            source = model, example, upload, fit = room.image(sources.models(many_levels=True))
            kind = room.menu("kind", "What happened to it", {name: name for name in OPERATORS})
            strengths = {
                short: room.slider(short, *numbers, visible=short == first)
                for short, numbers in STRENGTHS.items()
            }
            with room.place(gr.Group, "painting", visible=False) as painting:
                brush = gr.Brush(colors=["#ff2f6d"], default_size=36, color_mode="fixed")
                options = {"brush": brush, "eraser": gr.Eraser(default_size=36), "height": 440}
                options |= {"sources": (), "transforms": (), "layers": False, "buttons": []}
                options |= {"canvas_size": (CANVAS, CANVAS), "fixed_canvas": True}
                options |= {"type": "numpy", "format": "png"}
                label = "Paint over what is to be restored"
                painted = room.control(gr.ImageEditor, "paint", label=label, **options)
                label = "It is damaged already: add no noise"
                room.control(gr.Checkbox, "damaged", False, label=label)
            label = "Noise (std, for values 0 to 1)"
            room.slider("noise", label, 0.01, 0.3, Restore.noise, 0.01)
            room.buttons("Restore")
            with room.place(gr.Accordion, "more", "More settings", open=False):
                room.slider("draws", "Draws", 1, MOST_DRAWS, Restore.draws)
                room.slider("steps", "Steps of each", 5, MOST_STEPS, Restore.steps)
                room.seed()
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image and what happened to it, then restore it.")
            shown = room.place(gr.HTML, "pictures")
            room.lines_boxes()

    def other_kind(kind: str, *source: Any) -> Changes:
        short = OPERATORS[kind]
        changes = {slider: gr.update(visible=key == short) for key, slider in strengths.items()}
        changes[painting] = gr.update(visible=kind == PAINTED)
        if kind == PAINTED:
            picture = enlarged(pixels(sources.in_units(sources.chosen_image(*source))), CANVAS)
            changes[painted] = {"background": picture, "layers": [], "composite": None}
        return changes

    def other_model(model: str) -> Changes:
        names = sources.examples(model)
        return {example: gr.update(choices=names, value=names[0])}

    def prepare(
        model: str,
        example: str,
        upload: Any,
        fit: str,
        kind: str,
        paint: Any,
        damaged: bool,
        **values: Any,
    ) -> Run:
        stored, network = sources.chosen_image(model, example, upload, fit), sources.model_of(model)
        operator = operator_text(kind, {short: values.pop(short) for short in STRENGTHS})
        clean = not (kind == PAINTED and damaged)
        request = Restore(model, operator, clean=clean, **values)
        mask = painted_mask(paint, network.shape) if kind == PAINTED else None
        lines = request.lines()

        def change(drawn: Drawn) -> Changes:
            changes = {room.status: drawn.summary(), shown: figures(drawn.pictures())}
            if len(drawn.draws) and drawn.under_way is None:
                changes |= room.ready("restored.zip", download(drawn, stored, lines, mask))
            return changes

        return lambda tell: restored(network, stored, request, mask, tell), change, lines

    changed = room.on([model.change], other_model, [model], [example])
    events = [changed.then, kind.change, example.input, upload.change, fit.input]
    room.on(events, other_kind, [kind, *source], [*strengths.values(), painting, painted])
    room.runs(prepare, [shown])
