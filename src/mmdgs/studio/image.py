"""The posterior of an image: noisy, mean, uncertainty, draws, and components to walk along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from mmdgs.cost import Cost
from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.operators import ESTIMATE
from mmdgs.studio import sources
from mmdgs.studio.folder import bundle, stored_picture
from mmdgs.studio.pictures import Captioned, figures, spread_picture
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell
from mmdgs.uncertainty.image import ImagePosterior, PosteriorWork
from mmdgs.uncertainty.page import WORDS, page
from mmdgs.uncertainty.pictures import direction_picture, enlarged, framed, overview, pixels
from mmdgs.uncertainty.settings import PosteriorSettings, Region

MOST_DRAWS, MOST_COMPONENTS = 8, 5
WALK = 3.0
"""Standard deviations to either side that a component's slider reaches."""
SIGMAS = {"mnist": 0.5, "cifar10": 0.2, "celeba": 0.3}
"""The noise that each model's slider begins with."""
SIDE = 320
"""How wide the picture is that a region is chosen on, about."""
ABOUT = """A denoiser returns one image, and many could have given the same noisy one. Here is what
it knows (what all draws share) and what it invents (what differs from draw to draw), and the
directions in which it is least certain."""
WHOLE = "The whole image."


@dataclass(frozen=True)
class Image:
    """What is asked: `sigma` None is to be estimated; `clean` images get their noise here."""

    model: str
    sigma: float | None
    clean: bool = True
    draws: int = 4
    components: int = 3
    region: Region | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        components = (self.components, 0, MOST_COMPONENTS)
        sources.check_bounds(draws=(self.draws, 0, MOST_DRAWS), components=components)
        if self.clean and self.sigma is None:
            how = "choose a sigma, or say that it is noisy"
            raise UsageError(f"a clean image gets the noise that sigma says: {how}")

    def lines(self, sigma: float) -> tuple[str, str]:
        """The Python lines and the command; image.png and noisy.npy are in the download."""
        region = "" if self.region is None else f", region={self.region}"
        python = f"""import numpy, torch
import mmdgs

model = mmdgs.load("{self.model}")
noisy = torch.from_numpy(numpy.load("noisy.npy"))
settings = mmdgs.PosteriorSettings(
    {sigma!r}, components={self.components}, draws={self.draws}{region}, seed={self.seed}
)
posterior = mmdgs.image_posterior(model, noisy, settings)
print(posterior.mean, posterior.std, posterior.draws, posterior.directions, posterior.variances)"""
        options = [f"--sigma {ESTIMATE if self.sigma is None else f'{self.sigma:g}'}"]
        options += ["--simulate"] if self.clean else []
        options += [f"--components {self.components}", f"--draws {self.draws}"]
        options += [] if self.region is None else [f"--region {','.join(map(str, self.region))}"]
        command = f"mmdgs posterior {self.model} image.png {' '.join(options)}"
        return python, f"{command} --seed {self.seed} --out seen"


def posterior_of(
    model: Model, stored: numpy.ndarray, request: Image, tell: Tell[Any] = QUIET
) -> ImagePosterior:
    """The posterior of a stored image (C, H, W).

    `tell` hears (mean and uncertainty, words) first, where they are not all, then (None, words).
    """
    arrays = sources.shipped_result(sources.key_of(request, model, stored))
    if arrays is not None:
        return _from_arrays(arrays, request)
    settings = PosteriorSettings(
        ESTIMATE if request.sigma is None else request.sigma,
        simulate=request.clean,
        components=request.components,
        draws=request.draws,
        region=request.region,
        seed=request.seed,
    )
    work = PosteriorWork(model, [NamedImage("image", sources.in_units(stored))], settings)
    if request.draws or request.components:
        first = replace(work, settings=replace(settings, draws=0, components=0))
        words = "The mean is there; draws and components follow."
        tell((first.posterior(0), words))
    finished = 0

    def tick(count: int) -> None:
        nonlocal finished
        finished += count
        tell((None, f"{finished} of {settings.parts} parts are done."))

    return work.posterior(0, tick=tick)


def arrays_of(posterior: ImagePosterior) -> dict[str, numpy.ndarray]:
    """All that a result is made of, as arrays that ship."""
    scores, cost = posterior.scores, posterior.cost
    arrays = posterior.arrays() | {"scores": numpy.array(list(scores.values()))}
    arrays["score_names"] = numpy.array(list(scores))
    return arrays | {"cost": numpy.array([cost.forwards, cost.products])}


def _from_arrays(arrays: dict[str, Any], request: Image) -> ImagePosterior:
    names, cost = arrays.pop("score_names").tolist(), Cost(*arrays.pop("cost").tolist())
    scores = dict(zip(names, arrays.pop("scores").tolist(), strict=True))
    tensors: dict[str, Any] = {name: torch.from_numpy(a).float() for name, a in arrays.items()}
    tensors |= {"sigma": request.sigma, "region": None, "truth": tensors.get("truth")}
    return ImagePosterior(name="image", scores=scores, cost=cost, tiles=1, seconds=0.0, **tensors)


def pictures(posterior: ImagePosterior) -> list[Captioned]:
    """What is shown of a posterior, with words."""
    truth = posterior.truth
    shown = [] if truth is None else [("the clean image", pixels(truth))]
    shown.append((f"noisy, sigma {posterior.sigma:.3g}", pixels(posterior.noisy)))
    shown.append(("mean: the best single guess", pixels(posterior.mean)))
    shown.append(spread_picture("uncertainty", posterior.std))
    return shown + [(f"draw {i}", pixels(draw)) for i, draw in enumerate(posterior.draws, 1)]


def component_pictures(posterior: ImagePosterior) -> list[Captioned]:
    """What each component changes, with its standard deviation."""
    along = zip(posterior.stds.tolist(), posterior.skewness.tolist(), strict=True)
    return [
        (f"component {i + 1}: std {std:.3g}, skewness {skew:.2f}", direction_picture(posterior, i))
        for i, (std, skew) in enumerate(along)
    ]


def region_picture(stored: numpy.ndarray, box: Region | None = None) -> numpy.ndarray:
    """The image for choosing a region on, with a frame around a box."""
    picture = enlarged(pixels(sources.in_units(stored)), SIDE)
    if box is None:
        return picture
    from PIL import Image, ImageDraw

    x, y, width, height = (picture.shape[0] // stored.shape[1] * side for side in box)
    image = Image.fromarray(picture)
    corners = (x, y, x + width - 1, y + height - 1)
    ImageDraw.Draw(image).rectangle(corners, outline=(255, 64, 64), width=3)
    return numpy.asarray(image)


def pixel_at(stored: numpy.ndarray, index: Sequence[float]) -> tuple[int, int]:
    """The pixel (x, y) of an image at a place of its enlarged picture."""
    height, width = stored.shape[1:]
    scale = max(1, round(SIDE / max(height, width)))
    x, y = (int(place // scale) for place in index)
    return min(max(x, 0), width - 1), min(max(y, 0), height - 1)


def region_between(a: tuple[int, int], b: tuple[int, int]) -> Region:
    """The region (x, y, width, height) with these corners, both inside."""
    (left, right), (top, bottom) = (sorted(pair) for pair in zip(a, b, strict=True))
    return left, top, right - left + 1, bottom - top + 1


def walked(posterior: ImagePosterior, steps: Sequence[float]) -> Captioned:
    """The mean, so many standard deviations along each component."""
    steps = [float(step) for step in steps[: len(posterior.directions)]]
    moves = torch.tensor(steps) * posterior.stds
    image = posterior.mean + torch.einsum("k,kchw->chw", moves, posterior.directions)
    words = f", {', '.join(f'{step:+.1f}' for step in steps)} standard deviations"
    return f"the mean{words if any(steps) else ''}", framed(enlarged(pixels(image)), posterior)


def download(posterior: ImagePosterior, stored: numpy.ndarray, lines: tuple[str, str]) -> bytes:
    """A zip of the image, the arrays, a picture of all, the page, and the lines to repeat it."""
    files = {
        "image.png": stored_picture(stored),
        "noisy.npy": posterior.noisy.numpy(),
        "arrays.npz": posterior.arrays(),
        "overview.png": overview(posterior),
        "page.html": page(posterior).encode(),
    }
    return bundle("posterior", files, lines)


def summary(posterior: ImagePosterior) -> str:
    """Cost, scores and remarks in words."""
    cost = posterior.cost
    words = [f"Done: {cost.forwards:,} evaluations and {cost.products:,} Jacobian products."]
    scores = ((name, value) for name, value in posterior.scores.items() if name.startswith("psnr"))
    words += [f"{WORDS[name]}: {value:.3g}." for name, value in scores]
    return " ".join([*words, *posterior.remarks])


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""
    names = sources.models()
    corner, region = gr.State(None), gr.State(None)
    result = gr.State(None, time_to_live=1800)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            source = model, example, upload, fit = room.image(names)
            kinds = [("clean: add noise first", True), ("noisy already", False)]
            room.control(gr.Radio, "kind", kinds, value=True, label="The image is")
            label = "Noise (std, for values 0 to 1)"
            sigma = room.slider("sigma", label, 0.02, 1.0, SIGMAS[names[0]], 0.01)
            label = "Estimate it from the image"
            estimate = room.control(gr.Checkbox, "estimate", False, label=label)
            room.buttons("Show the posterior")
            with room.place(gr.Accordion, "more", "More settings", open=False):
                room.slider("draws", "Draws", 0, MOST_DRAWS, Image.draws)
                room.slider("components", "Components", 0, MOST_COMPONENTS, Image.components)
                room.controls["region"] = region
                room.seed()
            title = "Components of a part: click two corners"
            with room.place(gr.Accordion, "part", title, open=False):
                first = region_picture(
                    sources.chosen_image(names[0], sources.examples(names[0])[0])
                )
                options = {"interactive": False, "buttons": [], "format": "png", "height": 260}
                picture = room.place(gr.Image, "region", first, label="The image", **options)
                with gr.Row():
                    where = room.place(gr.Markdown, "where", WHOLE)
                    whole = room.place(gr.Button, "whole", "Whole image", size="sm", min_width=100)
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image, then show its posterior.")
            shown = room.place(gr.HTML, "pictures")
            with room.place(gr.Column, "walk", visible=False) as walk:
                gr.Markdown("**Walk along the components**, in standard deviations from the mean.")
                moved = room.place(gr.HTML, "moved")
                sliders = [
                    room.place(
                        gr.Slider, f"walk-{i}", -WALK, WALK, 0, step=0.1, label=f"Component {i}"
                    )
                    for i in range(1, MOST_COMPONENTS + 1)
                ]
                directions = room.place(gr.HTML, "changes")
            room.lines_boxes()

    def look(*source: Any) -> Changes:
        """The image that was chosen; the region is the whole again."""
        return {
            corner: None,
            region: None,
            picture: region_picture(sources.chosen_image(*source)),
            where: WHOLE,
        }

    def other_model(model: str) -> Changes:
        names, many = sources.examples(model), len(sources.model_of(model).levels) > 1
        return {
            example: gr.update(choices=names, value=names[0]),
            sigma: gr.update(value=SIGMAS[model], interactive=many),
            estimate: gr.update(value=False, interactive=many),
        }

    def click(index: Sequence[float], first: Any, *source: Any) -> Changes:
        stored = sources.chosen_image(*source)
        x, y = at = pixel_at(stored, index)
        if first is None:
            words = f"One corner at {x}, {y}: click the other."
            marked = region_picture(stored, (x, y, 1, 1))
            return {corner: at, region: None, picture: marked, where: words}
        box = region_between(first, at)
        words = f"{box[2]} x {box[3]} pixels from {box[0]}, {box[1]}."
        return {corner: None, region: box, picture: region_picture(stored, box), where: words}

    def prepare(
        model: str, example: str, upload: Any, fit: str, kind: bool, sigma: float, **values: Any
    ) -> Run:
        stored = sources.chosen_image(model, example, upload, fit)
        values["region"] = values["region"] and tuple(values["region"])
        noise = None if values.pop("estimate") else sigma
        request = Image(model, noise, bool(kind), **values)

        def change(state: Any) -> Changes:
            if isinstance(state, ImagePosterior):
                return finished(state, stored, request)
            posterior, words = state
            changes = {} if posterior is None else {shown: figures(pictures(posterior))}
            return {room.status: words, **changes}

        return (
            lambda tell: posterior_of(sources.model_of(request.model), stored, request, tell),
            change,
            None,
        )

    def finished(posterior: ImagePosterior, stored: numpy.ndarray, request: Image) -> Changes:
        count, lines = len(posterior.directions), request.lines(posterior.sigma)
        return {
            room.status: summary(posterior),
            shown: figures(pictures(posterior)),
            result: posterior,
            walk: gr.update(visible=count > 0),
            moved: figures([walked(posterior, [0.0] * count)]),
            directions: figures(component_pictures(posterior)),
            **room.lines(lines),
            **room.ready("posterior.zip", download(posterior, stored, lines)),
            **{slider: gr.update(value=0, visible=i < count) for i, slider in enumerate(sliders)},
        }

    def step(posterior: ImagePosterior | None, *steps: float) -> Changes:
        return {moved: gr.update() if posterior is None else figures([walked(posterior, steps)])}

    looked = [corner, region, picture, where]
    changed = room.on([model.change], other_model, [model], [example, sigma, estimate])
    events = [changed.then, example.input, upload.change, fit.input, whole.click]
    room.on(events, look, source, looked)
    room.clicks(picture, click, [corner, *source], looked)
    room.runs(prepare, [shown, result, walk, moved, directions, *sliders])
    inputs = [slider.input for slider in sliders]
    room.on(inputs, step, [result, *sliders], [moved], trigger_mode="always_last")
