"""The posterior of an image: noisy, mean, uncertainty, draws, and components that can be walked along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy
import torch

from mmdgs.cost import Cost
from mmdgs.errors import UsageError
from mmdgs.generation.posterior_folder import PosteriorWork
from mmdgs.generation.posterior_page import page
from mmdgs.generation.posterior_pictures import direction_picture, enlarged, framed, overview, pixels
from mmdgs.generation.posteriors import ImagePosterior, PosteriorSettings, Region, parts_of
from mmdgs.models import Model
from mmdgs.operators import ESTIMATE
from mmdgs.studio.downloads import bundle, npy, npz, stored_png
from mmdgs.studio.pictures import spread_picture
from mmdgs.studio.sources import in_colours_of, in_units, keep, kept, key_of, tensors

MOST_DRAWS, MOST_COMPONENTS = 8, 5
DRAWS, COMPONENTS = 4, 3
WALK = 3.0
"""Standard deviations to either side that a component's slider reaches."""
SIGMAS = {"mnist": 0.5, "cifar10": 0.2, "celeba": 0.3}
"""The noise that each model's slider begins with."""
SIDE = 320
"""How wide the picture is that a region is chosen on, about."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of an image: `sigma` None stands for an estimate; `clean` images get their noise here."""

    model: str
    sigma: float | None
    clean: bool = True
    draws: int = DRAWS
    components: int = COMPONENTS
    region: Region | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (("draws", self.draws, MOST_DRAWS), ("components", self.components, MOST_COMPONENTS)):
            if not 0 <= value <= most:
                raise UsageError(f"{name} must be 0 to {most} here, got {value}; the command takes more")
        if self.clean and self.sigma is None:
            raise UsageError("a clean image gets the noise that sigma says: choose a sigma, or say that it is noisy")

    @property
    def asked(self) -> PosteriorSettings:
        return PosteriorSettings(self.components, self.draws, self.region, seed=self.seed)

    def key(self, stored: numpy.ndarray, model: Model) -> str:
        """The name of the result for an image, by a model's weights."""
        return key_of("image", **asdict(self), image=stored.tobytes().hex(), shape=stored.shape, weights=model.digest)


def posterior_of(
    model: Model,
    stored: numpy.ndarray,
    wanted: Wanted,
    *,
    tell: Callable[[ImagePosterior | tuple[int, int]], Any] = lambda found: None,
) -> ImagePosterior:
    """The posterior of a stored image, uint8 (C, H, W).

    `tell` hears of the mean and its uncertainty first, where they are not all, then (parts done, parts) as they are.
    """
    image, remarks = in_colours_of(model, stored, "image", clean=wanted.clean)
    key = wanted.key(stored, model)
    if (found := kept(key)) is not None:
        return _from_arrays(found, wanted, remarks)
    sigma = ESTIMATE if wanted.sigma is None else wanted.sigma
    work = PosteriorWork(model, [image], wanted.asked, sigma, wanted.clean)
    work.check(False)
    if wanted.draws or wanted.components:
        first = replace(work, asked=replace(work.asked, draws=0, components=0)).seen(0, None, lambda count: None)
        tell(replace(first, remarks=(*remarks, *first.remarks)))
    total, done = parts_of(wanted.asked), 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        tell((done, total))

    seen = work.seen(0, None, tick)
    keep(key, arrays_of(seen))
    return replace(seen, remarks=(*remarks, *seen.remarks))


def arrays_of(seen: ImagePosterior) -> dict[str, numpy.ndarray]:
    """All that a result is made of, as arrays."""
    found = seen.arrays() | {"scores": numpy.array(list(seen.scores.values()))}
    found["score_names"] = numpy.array(list(seen.scores))
    return found | {"cost": numpy.array([seen.cost.forwards, seen.cost.products])}


def _from_arrays(arrays: Any, wanted: Wanted, remarks: tuple[str, ...]) -> ImagePosterior:
    """A result that was kept."""
    values = tensors({name: value for name, value in arrays.items() if name not in ("score_names", "cost")})
    names = {field.name for field in fields(ImagePosterior)}
    sigma = float(values["sigma"])
    if wanted.sigma is None:
        remarks = (*remarks, f"The noise was estimated from the image: {sigma:.3g}.")
    scores = {str(name): float(one) for name, one in zip(arrays["score_names"], values["scores"], strict=True)}
    given = {name: value for name, value in values.items() if name in names and name not in ("sigma", "scores")}
    return ImagePosterior(
        name="image",
        sigma=sigma,
        **{"truth": None, **given},  # type: ignore[arg-type]
        region=wanted.region,
        tiles=1,
        cost=Cost(*map(int, arrays["cost"])),
        seconds=0.0,
        scores=scores,
        remarks=remarks,
    )


def pictures(seen: ImagePosterior) -> list[tuple[str, numpy.ndarray]]:
    """What is shown of a posterior, with words."""
    found = [] if seen.truth is None else [("the clean image", pixels(seen.truth))]
    found += [
        (f"noisy, sigma {seen.sigma:.3g}", pixels(seen.noisy)),
        ("mean: the best single guess", pixels(seen.mean)),
    ]
    found.append(spread_picture("uncertainty", seen.std))
    return found + [(f"draw {i + 1}", pixels(one)) for i, one in enumerate(seen.draws)]


def component_pictures(seen: ImagePosterior) -> list[tuple[str, numpy.ndarray]]:
    """What each component changes, with its standard deviation."""
    return [
        (f"component {i + 1}: std {std:.3g}, skewness {skew:.2f}", direction_picture(seen, i))
        for i, (std, skew) in enumerate(zip(seen.stds.tolist(), seen.skewness.tolist(), strict=True))
    ]


def region_picture(stored: numpy.ndarray, region: Region | None, corner: tuple[int, int] | None) -> numpy.ndarray:
    """The image for choosing a region on, with the region, or its first corner, framed."""
    picture = enlarged(pixels(in_units(stored)), SIDE)
    box = region or ((*corner, 1, 1) if corner else None)
    if box is None:
        return picture
    from PIL import Image, ImageDraw

    scale = picture.shape[0] // stored.shape[1]
    x, y, w, h = (scale * one for one in box)
    image = Image.fromarray(picture)
    ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), outline=(255, 64, 64), width=3)
    return numpy.asarray(image)


def pixel_at(stored: numpy.ndarray, index: Sequence[float]) -> tuple[int, int]:
    """The pixel (x, y) of an image at a place of its enlarged picture."""
    scale = max(1, round(SIDE / max(stored.shape[1:])))
    height, width = stored.shape[1:]
    x, y = (int(one // scale) for one in index)
    return min(max(x, 0), width - 1), min(max(y, 0), height - 1)


def region_between(a: tuple[int, int], b: tuple[int, int]) -> Region:
    """The region (x, y, width, height) with these corners, both inside."""
    (left, right), (top, bottom) = (sorted(pair) for pair in zip(a, b, strict=True))
    return left, top, right - left + 1, bottom - top + 1


def moved(seen: ImagePosterior, steps: Sequence[float]) -> numpy.ndarray:
    """The mean, so many standard deviations along each component."""
    far = torch.tensor([float(one) for one in steps[: len(seen.directions)]]) * seen.stds
    image = seen.mean + torch.einsum("k,kchw->chw", far, seen.directions)
    return framed(enlarged(pixels(image)), seen)


def download(seen: ImagePosterior, stored: numpy.ndarray, wanted: Wanted) -> bytes:
    """A zip of the image, the arrays, one picture of all, the page, and the lines that make it again."""
    python, command = lines(wanted, seen.sigma)
    return bundle(
        "posterior",
        {
            "image.png": stored_png(stored),
            "noisy.npy": npy(seen.noisy.numpy()),
            "arrays.npz": npz(seen.arrays()),
            "overview.png": overview(seen),
            "page.html": page(seen).encode(),
            "again.py": (python + "\n").encode(),
            "again.txt": (command + "\n").encode(),
        },
    )


def lines(wanted: Wanted, sigma: float) -> tuple[str, str]:
    """The Python lines and the command that give the same; image.png and noisy.npy are in the download."""
    region = "" if wanted.region is None else f", region={wanted.region}"
    python = f"""import numpy, torch
import mmdgs

model = mmdgs.load("{wanted.model}")
noisy = torch.from_numpy(numpy.load("noisy.npy"))
asked = mmdgs.PosteriorSettings(components={wanted.components}, draws={wanted.draws}{region}, seed={wanted.seed})
seen = mmdgs.image_posterior(model, noisy, {sigma!r}, asked)
print(seen.mean, seen.std, seen.draws, seen.directions, seen.variances)"""
    options = [f"--sigma {ESTIMATE if wanted.sigma is None else f'{wanted.sigma:g}'}"]
    options += ["--simulate"] if wanted.clean else []
    options += [f"--components {wanted.components}", f"--draws {wanted.draws}"]
    options += [] if wanted.region is None else [f"--region {','.join(map(str, wanted.region))}"]
    return python, f"mmdgs posterior {wanted.model} image.png {' '.join(options)} --seed {wanted.seed} --out seen"
