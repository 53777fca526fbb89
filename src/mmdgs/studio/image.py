"""The posterior of an image: noisy, mean, uncertainty, draws, and components to walk along."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from mmdgs.cost import Cost
from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.linalg.components import inside
from mmdgs.models import Model
from mmdgs.models.shipped import PHOTO
from mmdgs.operators import ESTIMATE
from mmdgs.studio import sources
from mmdgs.studio.folder import bundle, stored_picture
from mmdgs.studio.pictures import Captioned, figures, spread_picture, stack
from mmdgs.studio.streaming import QUIET, Changes, Run, Tell
from mmdgs.uncertainty.image import ImagePosterior, PosteriorWork
from mmdgs.uncertainty.page import page
from mmdgs.uncertainty.pictures import direction_picture, overview, pixels
from mmdgs.uncertainty.regions import SIDE
from mmdgs.uncertainty.settings import PosteriorSettings, Region

MOST_DRAWS, MOST_COMPONENTS = 8, 5
OF_FIXED_SIZE, OF_ANY_SIZE, PART = (41, 64, 60), (13, 0, 120), 128 * 128
"""About the evaluations (a product takes four) of a mean with its uncertainty, a draw and a
component, which with a model of any size is one of a part of so many pixels."""
WALK = 3.0
"""Standard deviations to either side that a component's slider reaches."""
SIGMAS = {PHOTO: 0.1, "mnist": 0.5, "cifar10": 0.2, "celeba": 0.3}
"""The noise that each model's slider begins with."""
LEAST_REGION = 8
"""Pixels a side of the region around a click, which is a third of a small image."""
ABOUT = """A denoiser returns one image, and many could have given the same noisy one. Here is what
it knows (what all draws share) and what it invents (what differs from draw to draw), and the
directions in which it is least certain. **Click on a place of the mean** to see the components
around it."""
WALKS = """**Walk along the components**, in standard deviations from the mean."""


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


Told = tuple[ImagePosterior, str]
"""What is there of a posterior, and words."""


def posterior_of(
    model: Model,
    stored: numpy.ndarray,
    request: Image,
    tell: Tell[Told] = QUIET,
    known: ImagePosterior | None = None,
) -> ImagePosterior:
    """The posterior of a stored image (C, H, W); where one is `known`, its components alone.

    `tell` hears of the mean and uncertainty first, and then of every part.
    """
    arrays = sources.shipped_result(sources.key_of(request, model, stored))
    if arrays is not None:
        return _from_arrays(arrays, request)
    settings = PosteriorSettings(
        ESTIMATE if request.sigma is None else request.sigma,
        simulate=request.clean,
        components=request.components,
        draws=request.draws if known is None else 0,
        region=request.region,
        seed=request.seed,
    )
    model = model.grey() if len(stored) == 1 else model  # its one channel is measured once
    work = PosteriorWork(model, [NamedImage("image", sources.in_units(stored))], settings)
    first = known
    if known is None and (request.draws or request.components):
        first = replace(work, settings=replace(settings, draws=0, components=0)).posterior(0)
        tell((first, "The mean is there; draws and components follow."))
    finished = 0

    def tick(count: int) -> None:
        nonlocal finished
        finished += count
        if first is not None:
            tell((first, f"{finished} of {settings.parts} parts are done."))

    posterior = work.posterior(0, tick=tick)
    return posterior if known is None else replace(posterior, draws=known.draws)


def expected(model: Model, stored: numpy.ndarray, request: Image, *, known: bool) -> str:
    """How long a posterior takes, in words."""
    if sources.ships(sources.key_of(request, model, stored)):
        return "at once"
    mean, draw, component = OF_ANY_SIZE if model.any_size else OF_FIXED_SIZE
    part = min(1.0, PART / stored[0].size) if model.any_size else 1.0
    evaluations = (1 if known else 2) * mean + request.components * component * part
    evaluations += 0 if known else request.draws * draw
    return sources.duration(request.model, stored.shape, evaluations)


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


def pictures(posterior: ImagePosterior) -> str:
    """What is shown of a posterior, as HTML."""
    truth, (height, width) = posterior.truth, posterior.mean.shape[1:]
    x, y, w, h = posterior.region or (0, 0, 0, 0)
    frame = (x / width, y / height, w / width, h / height) if w else ()
    mean = ("mean", pixels(posterior.mean)), spread_picture("uncertainty", posterior.std)
    draws = [(f"draw {i}", pixels(draw)) for i, draw in enumerate(posterior.draws, 1)]
    shown = stack("fades", mean, frame) + (stack("turns", draws) if draws else "")
    others = [] if truth is None else [("the clean image", pixels(truth))]
    others.append((f"noisy, sigma {posterior.sigma:.3g}", pixels(posterior.noisy)))
    return figures(others, before=shown)


def component_pictures(posterior: ImagePosterior) -> list[Captioned]:
    """What each component changes, with its standard deviation."""
    along = zip(posterior.stds.tolist(), posterior.skewness.tolist(), strict=True)
    return [
        (f"component {i + 1}: std {std:.3g}, skewness {skew:.2f}", direction_picture(posterior, i))
        for i, (std, skew) in enumerate(along)
    ]


def region_around(place: Sequence[float], height: int, width: int) -> Region:
    """The region (x, y, width, height) around a place, in shares of an image's width and height."""
    region = []
    for share, whole in zip(place, (width, height), strict=True):
        side = min(whole, SIDE, max(LEAST_REGION, whole // 3))
        region.append((round(min(max(share * whole - side / 2, 0), whole - side)), side))
    (x, w), (y, h) = region
    return x, y, w, h


def walked(posterior: ImagePosterior, steps: Sequence[float]) -> Captioned:
    """The mean, so many standard deviations along each component."""
    steps = [float(step) for step in steps[: len(posterior.directions)]]
    moves = torch.tensor(steps) * posterior.stds
    image = posterior.mean + torch.einsum("k,kchw->chw", moves, posterior.directions)
    image = image if posterior.region is None else inside(image, posterior.region)
    words = f", {', '.join(f'{step:+.1f}' for step in steps)} standard deviations"
    return f"the mean{words if any(steps) else ''}", pixels(image)


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
    if scores := posterior.scores:
        words.append(f"PSNR {scores['psnr_mean']:.1f} dB, of the noisy {scores['psnr_noisy']:.1f}.")
        words.append(f"90% intervals hold {100 * scores['coverage_90']:.0f}% of the pixels.")
    return " ".join([*words, *posterior.remarks])


def sigma_control(model: str) -> dict[str, Any]:
    """The slider of the noise: within what a model knows, and fixed where it knows one alone."""
    network = sources.model_of(model)
    width = network.interval[1] - network.interval[0]
    own = [level.ratio / width for level in network.levels]
    bounds = {"minimum": max(0.01, math.ceil(100 * min(own)) / 100), "maximum": min(1.0, max(own))}
    if len(own) == 1:
        bounds = {"minimum": 0.01, "maximum": 1.0}
    return {**bounds, "value": SIGMAS[model] if own[1:] else own[0], "interactive": len(own) > 1}


def build(room: Any, gr: Any) -> None:
    """Add the room to the page that is being built, with Gradio as `gr`."""
    names = sources.models()
    place, result = gr.State(None), gr.State(None, time_to_live=1800)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            source = model, *_ = room.image(names)
            kinds = [("clean: add noise first", True), ("noisy already", False)]
            kind = room.control(gr.Radio, "kind", kinds, value=True, label="The image is")
            label = "Noise (std, for values 0 to 1)"
            options = {"step": 0.01, "label": label, **sigma_control(names[0])}
            sigma = room.control(gr.Slider, "sigma", **options)
            label = "Estimate it from the image"
            options = {"label": label, "interactive": options["interactive"]}
            estimate = room.control(gr.Checkbox, "estimate", False, **options)
            room.buttons("Show the posterior")
            with room.place(gr.Accordion, "more", "More settings", open=False):
                draws = room.slider("draws", "Draws", 0, MOST_DRAWS, Image.draws)
                count = (0, MOST_COMPONENTS, Image.components)
                components = room.slider("components", "Components", *count)
                room.controls |= {"place": place, "result": result}
                room.seed()
        with gr.Column(scale=3, min_width=300):
            room.status_line("Choose an image, then show its posterior.")
            shown = room.viewer()
            with room.place(gr.Column, "walk", visible=False) as walk:
                with gr.Row():
                    gr.Markdown(WALKS)
                    options = {"size": "sm", "min_width": 100, "scale": 0, "visible": False}
                    whole = room.place(gr.Button, "whole", "Undo the click", **options)
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
        """The image that was chosen; its components are those of the whole again."""
        stored = sources.chosen_image(*source)
        words = sources.described(stored, source[2])
        picture = (words, pixels(sources.in_units(stored)))
        return {place: None, shown: figures([picture], wide=True), walk: gr.update(visible=False)}

    def other_model(model: str) -> Changes:
        options = sigma_control(model)
        interactive = options["interactive"]
        return {
            sigma: gr.update(**options),
            estimate: gr.update(value=False, interactive=interactive),
        }

    def prepare(kind: bool, sigma: float, place: Any, result: Any, **values: Any) -> Run:
        model, upload = values["model"], values["upload"]
        source = [values.pop(name) for name in ("model", "example", "upload", "fit")]
        stored, network = sources.chosen_image(*source), sources.model_of(model)
        noise = None if values.pop("estimate") else sigma
        whole = Image(model, noise, bool(kind), **values)
        key, request = sources.key_of(whole, network, stored), whole
        if place is not None:
            region = region_around(place, *stored.shape[1:])
            components = whole.components or Image.components
            request = replace(whole, region=region, components=components)
        known = result[1] if result is not None and result[0] == key else None

        def work(tell: Tell[Told]) -> Told:
            return posterior_of(network, stored, request, tell, known), ""

        def change(state: Told) -> Changes:
            posterior, words = state
            if not words:
                return finished(posterior, key, request)
            return {room.status: words, shown: pictures(posterior)}

        def saved(state: Told) -> tuple[str, bytes]:
            lines = request.lines(state[0].sigma)
            return "posterior.zip", download(state[0], stored, lines)

        time = expected(network, stored, request, known=known is not None)
        words = f"{sources.described(stored, upload)}: the posterior takes {time}."
        return Run(work, change, saved, None, words)

    def finished(posterior: ImagePosterior, key: str, request: Image) -> Changes:
        count = len(posterior.directions)
        return {
            room.status: summary(posterior),
            shown: pictures(posterior),
            result: (key, posterior),
            walk: gr.update(visible=count > 0),
            whole: gr.update(visible=request.region is not None),
            moved: figures([walked(posterior, [0.0] * count)]),
            directions: figures(component_pictures(posterior)),
            **room.lines(request.lines(posterior.sigma)),
            **{slider: gr.update(value=0, visible=i < count) for i, slider in enumerate(sliders)},
        }

    def step(result: Any, *steps: float) -> Changes:
        return {moved: gr.update() if result is None else figures([walked(result[1], steps)])}

    room.on([model.change], other_model, [model], [sigma, estimate])
    looked = room.looks(source, look, [place, shown, walk])
    settled = [*looked, kind.input, sigma.release, estimate.input]
    room.announces(prepare, [*settled, draws.release, components.release])
    clicked = room.clicks(shown, lambda index: {place: tuple(index)}, None, [place])
    to_whole = room.on([whole.click], lambda: {place: None}, None, [place])
    outputs = [shown, result, walk, whole, moved, directions, *sliders]
    room.runs(prepare, outputs, [clicked.then, to_whole.then])
    inputs = [slider.input for slider in sliders]
    room.on(inputs, step, [result, *sliders], [moved], trigger_mode="always_last")
