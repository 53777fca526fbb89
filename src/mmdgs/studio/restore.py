"""Restoration: an image is degraded or painted over; draws of p(x | y) are shown as they come."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.operators import ESTIMATE, Mask, Operator, named
from mmdgs.restoration import draws as restoration
from mmdgs.restoration.folder import as_image, scores_of, simulated
from mmdgs.restoration.settings import GOOD, quality_named
from mmdgs.sampling.named import edm_levels
from mmdgs.studio import sources
from mmdgs.studio.folder import bundle, stored_picture
from mmdgs.studio.pictures import figures, spread_picture, stack, visible_state
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell
from mmdgs.uncertainty.pictures import pixels

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
MOST_DRAWS = 8
COSTS = {"fast": 10, GOOD: 25, "best": 48}
"""Evaluations of a draw by quality (restoration/settings.py)."""
CANVAS = 384
"""Pixels a side of the picture that is painted on."""
ABOUT = """Part of an image is missing, blurred or too coarse. Many images explain what is left:
each draw is one of them, their mean is the best single guess, and where they differ nothing was
known."""


@dataclass(frozen=True)
class Restore:
    """What is asked: an operator as in commands (mask.png is painted), and `noise` (None: estimate
    it). A `clean` image is degraded by both first; any other is a measurement already.
    """

    model: str
    operator: str
    noise: float | None = 0.05
    draws: int = 4
    quality: str = GOOD
    seed: int = 0
    clean: bool = True

    def __post_init__(self) -> None:
        sources.check_bounds(draws=(self.draws, 1, MOST_DRAWS))
        quality_named(self.quality)
        if self.clean and self.noise is None:
            how = "choose a noise, or say that it is damaged already"
            raise UsageError(f"a clean image gets the noise that is said: {how}")
        if not self.clean and self.operator.startswith("random"):
            raise UsageError("nobody knows here which pixels of your image are missing: paint them")

    def shape(self, model: Model, stored: numpy.ndarray) -> tuple[int, ...]:
        """The shape of the image that is restored, from the one that was chosen."""
        divisor, sides = named.divisor(self.operator), stored.shape[1:]
        if self.clean:
            sides = tuple(side - side % divisor for side in sides)
        else:
            sides = tuple(side * divisor for side in sides)
        sources.check_bounds(pixels=(math.prod(sides), 1, sources.MOST_WORKED))
        return self.taken(model, stored).sized(*sides).shape

    def taken(self, model: Model, stored: numpy.ndarray) -> Model:
        """The model, or that of grey images, whose one channel was measured once."""
        colours = len(stored) > 1 or self.operator == OPERATORS["grey to colour"]
        return model if colours else model.grey()

    def lines(self, shape: tuple[int, ...]) -> tuple[str, str]:
        """The Python lines and the command; the files they name are in the download."""
        noise = ESTIMATE if self.noise is None else self.noise
        python = f"""import numpy, torch
import mmdgs
from mmdgs.operators.named import parse_operator

model = mmdgs.load("{self.model}")
operator = parse_operator("{self.operator}", {shape}, seed={self.seed})
y = torch.from_numpy(numpy.load("measured.npy"))[None]
restored = mmdgs.restore(
    model, y, operator,
    noise={noise!r}, quality="{self.quality}", draws={self.draws}, seed={self.seed},
)
print(restored.draws, restored.mean, restored.std)"""
        command = f"mmdgs restore {self.model} image.png --operator {self.operator}"
        command += f" --noise {noise}{' --simulate' if self.clean else ''} --quality {self.quality}"
        return python, f"{command} --draws {self.draws} --seed {self.seed} --out restored"


def operator_text(name: str, strengths: dict[str, float]) -> str:
    """The operator of a command, such as sr:4, from the room's controls."""
    if name not in OPERATORS:
        raise UsageError(f"choose one of {', '.join(OPERATORS)}, got {name!r}")
    short = OPERATORS[name]
    return f"{short}:{strengths[short]:g}" if short in STRENGTHS else short


def canvas(stored: numpy.ndarray) -> numpy.ndarray:
    """A square of CANVAS pixels to paint on, with the image as large as it fits, left and above."""
    from PIL import Image

    picture, square = pixels(sources.in_units(stored)), Image.new("RGB", (CANVAS, CANVAS), "grey")
    scale = CANVAS / max(picture.shape[:2])
    sides = [max(1, round(scale * side)) for side in picture.shape[1::-1]]
    way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    square.paste(Image.fromarray(picture).resize((sides[0], sides[1]), way), (0, 0))
    return numpy.asarray(square)


def painted_mask(paint: Any, shape: tuple[int, ...]) -> numpy.ndarray:
    """Which pixels are measured (H, W), from the layers of a painting on `canvas`, of any size."""
    layers = [layer for layer in (paint or {}).get("layers") or [] if layer.shape[2:] == (4,)]
    alpha = numpy.max([layer[..., 3] for layer in layers], 0) if layers else numpy.zeros(1)
    if not alpha.any():
        raise UsageError("paint over the part of the image that is to be restored")
    height, width = (
        max(1, round(whole * side / max(shape[-2:])))
        for whole, side in zip(alpha.shape, shape[-2:], strict=True)
    )
    strength = torch.from_numpy(alpha[:height, :width].astype(numpy.float32))[None, None]
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
    noise: float | None = None

    def summary(self) -> str:
        """How far it is, or how near the truth is where there is one."""
        done, total = self.done
        if done < total:
            return f"{len(self.draws)} draws are there; {100 * done // total}% is done."
        words = f"Done: {len(self.draws)} draws."
        if self.noise is not None:
            words += f" The noise was estimated: {self.noise:.3g}."
        if self.truth is not None:
            scores = scores_of(self.draws[:, None], self.truth[None])
            words += f" PSNR of the mean: {scores['psnr_mean']:.1f} dB, "
            words += f"of a draw: {scores['psnr_draw']:.1f} dB."
            if len(self.draws) > 1:
                share = 100 * scores["coverage_90"]
                words += f" 90% intervals of the draws hold {share:.0f}% of the pixels."
        return words

    def pictures(self) -> str:
        """What is shown, as HTML."""
        count, before = len(self.draws), ""
        others = [] if self.truth is None else [("the clean image", pixels(self.truth))]
        others.append(("what was measured", pixels(self.measurement)))
        if count:
            spread = self.draws.std(0, correction=min(1, count - 1))
            mean = f"mean of {count} draws", pixels(self.draws.mean(0))
            before = stack("fades", [mean, spread_picture("where they differ", spread)])
            draws = [(f"draw {i}", pixels(draw)) for i, draw in enumerate(self.draws, 1)]
            before += stack("turns", draws)
        states = () if self.under_way is None else self.under_way
        others += [(f"draw {i}, under way", pixels(x)) for i, x in enumerate(states, count + 1)]
        return figures(others, before=before)


def restored(
    model: Model,
    stored: numpy.ndarray,
    request: Restore,
    mask: numpy.ndarray | None = None,
    tell: Tell[Drawn] = QUIET,
) -> Drawn:
    """Draws of an image given its measurement, under a painted mask (H, W) or the operator."""
    shipped = sources.shipped_result(sources.key_of(request, model, stored, mask))
    model, shape = request.taken(model, stored), request.shape(model, stored)
    if mask is not None:
        operator: Operator = Mask(torch.from_numpy(mask), shape)
    else:
        operator = named.parse_operator(request.operator, shape, seed=request.seed)
    expected = tuple(shape if request.clean else operator.out_shape)
    if request.clean:
        stored = stored[:, : expected[1], : expected[2]]  # cropped where a factor asks for it
    if stored.shape[1:] != expected[1:]:
        sizes = [f"{width} x {height}" for height, width in (stored.shape[1:], expected[1:])]
        raise UsageError(f"the image has {sizes[0]} pixels; expected {sizes[1]}, measured so")
    channels, named_image = expected[0], NamedImage("image", sources.in_units(stored))
    image, _ = named_image.in_channels(channels, clean=request.clean)
    x, (low, high), steps = image[None], model.interval, quality_named(request.quality)[1]
    noise: Any = ESTIMATE if request.noise is None else request.noise
    y = simulated(x, operator, noise, seed=request.seed) if request.clean else x
    total = request.draws * steps
    measurement = as_image(operator.known(y), torch.Size(shape))[0]
    truth = image if request.clean else None
    begun = Drawn(truth, measurement, y[0], torch.empty(0, *shape), done=(0, total))

    if shipped is not None:
        draws = torch.from_numpy(shipped["draws"]).float()
        return replace(begun, draws=draws, done=(total, total))
    tell(begun)
    finished: list[Tensor] = []
    levels = edm_levels(model, steps)

    def note(step: int, state: Any, info: Any, first: int) -> None:
        last, states = step + 1 == steps, (state.x.cpu() - low) / (high - low)
        if last:
            finished.extend(states)
        if last or tell.due():
            ratio = 0 if last else levels[step + 1].ratio / (high - low)
            under_way = None if last else visible_state(states, ratio)
            draws = torch.stack(finished) if finished else begun.draws
            done = (first * steps + (step + 1) * len(states), total)
            tell(replace(begun, draws=draws, under_way=under_way, done=done))

    posterior = restoration.restore(
        model, y, operator, noise=noise, quality=request.quality, draws=request.draws,
        seed=request.seed, batch_size=2, progress=None, callback=note,
    )  # fmt: skip
    estimated = posterior.noise.square().mean().sqrt().item() if request.noise is None else None
    return replace(begun, draws=posterior.draws[:, 0], done=(total, total), noise=estimated)


def download(
    drawn: Drawn, stored: numpy.ndarray, lines: tuple[str, str], mask: numpy.ndarray | None
) -> bytes:
    """A zip of the image, the measurement, the draws, and the lines that make them again."""
    files: dict[str, Any] = {"image.png": stored_picture(stored)}
    files["measured.npy"] = drawn.y.numpy()
    if len(drawn.draws):
        mean = drawn.draws.mean(0)
        files["draws.npz"] = {"draws": drawn.draws.numpy(), "mean": mean.numpy()}
        files["mean.png"] = pixels(mean)
    files |= {f"draw-{i}.png": pixels(draw) for i, draw in enumerate(drawn.draws, 1)}
    files |= {} if mask is None else {MASK: (mask * 255).astype(numpy.uint8)}
    return bundle("restored", files, lines)


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""
    first = next(iter(OPERATORS.values()))
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            source = room.image(sources.models(restoring=True))
            kinds = [("clean: damage it", True), ("damaged already", False)]
            clean = room.control(gr.Radio, "clean", kinds, value=True, label="The image is")
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
                label = "Paint what to restore"
                painted = room.control(gr.ImageEditor, "paint", label=label, **options)
            label = "Noise (std, for values 0 to 1)"
            room.slider("noise", label, 0.01, 0.3, Restore.noise, 0.01)
            label = "Estimate it from the image"
            estimate = room.control(gr.Checkbox, "estimate", False, label=label, visible=False)
            words = {name: f"{name}: {n} evaluations a draw" for name, n in COSTS.items()}
            quality = room.menu("quality", "Quality", words, value=GOOD)
            room.buttons("Restore")
            with room.place(gr.Accordion, "more", "More settings", open=False):
                draws = room.slider("draws", "Draws", 1, MOST_DRAWS, Restore.draws)
                room.seed()
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image and what happened to it, then restore it.")
            shown = room.viewer()
            room.lines_boxes()

    def chosen(
        operator: str, clean: bool, model: str, example: str, upload: Any, fit: str
    ) -> numpy.ndarray:
        """The image; of one that is measured already, that of a model of fixed size is smaller."""
        size, divisor = sources.model_of(model).shape[1:], named.divisor(operator)
        size = size if clean or None in size else tuple(side // divisor for side in size)
        return sources.chosen_image(model, example, upload, fit, size)

    def look(clean: bool, kind: str, factor: int, box: int, *source: Any) -> Changes:
        """The image that was chosen, and the controls of what happened to it."""
        short = OPERATORS[kind]
        stored = chosen(f"sr:{factor}" if short == "sr" else short, clean, *source)
        picture = (sources.described(stored, source[2]), pixels(sources.in_units(stored)))
        changes = {slider: gr.update(visible=key == short) for key, slider in strengths.items()}
        most = max(STRENGTHS["box"][2], min(stored.shape[1:]) * 3 // 4)
        limits = {"maximum": most, "value": min(box, most), "visible": short == "box"}
        changes[strengths["box"]] = gr.update(**limits)
        changes |= {painting: gr.update(visible=kind == PAINTED), shown: figures([picture], True)}
        changes[estimate] = gr.update(visible=not clean, **({"value": False} if clean else {}))
        if kind == PAINTED:
            changes[painted] = {"background": canvas(stored), "layers": [], "composite": None}
        return changes

    def prepare(kind: str, paint: Any, **values: Any) -> Run:
        model, upload = values["model"], values["upload"]
        source = [model, *(values.pop(name) for name in ("example", "upload", "fit"))]
        network = sources.model_of(model)
        operator = operator_text(kind, {short: values.pop(short) for short in STRENGTHS})
        if values.pop("estimate"):
            values["noise"] = None
        request = Restore(operator=operator, **values)
        stored = chosen(operator, request.clean, *source)
        shape = request.shape(network, stored)
        mask = painted_mask(paint, shape) if kind == PAINTED else None
        lines = request.lines(shape)

        def change(drawn: Drawn) -> Changes:
            return {room.status: drawn.summary(), shown: drawn.pictures()}

        def saved(drawn: Drawn) -> tuple[str, bytes]:
            return "restored.zip", download(drawn, stored, lines, mask)

        time = "at once"
        if not sources.ships(sources.key_of(request, network, stored, mask)):
            time = sources.duration(model, shape, request.draws * COSTS[request.quality])
        words = f"{sources.described(stored, upload)}: {request.draws} draws take {time}."

        def work(tell: Tell[Drawn]) -> Drawn:
            return restored(network, stored, request, mask, tell)

        return Run(work, change, saved, lines, words)

    outputs = [*strengths.values(), painting, painted, estimate, shown]
    others = [clean, kind, strengths["sr"], strengths["box"]]
    events = [clean.input, kind.change, strengths["sr"].release]
    looked = room.looks(source, look, outputs, others, events)
    room.announces(prepare, [*looked, quality.input, draws.release])
    room.runs(prepare, [shown])
