"""Restoration: an image is degraded, or painted over, and draws of p(x | y) are shown as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.errors import UsageError
from mmdgs.generation.posterior_pictures import pixels
from mmdgs.generation.restoration import MULTISTEP, restore
from mmdgs.generation.restored import as_image, scores_of, simulated
from mmdgs.models import Model
from mmdgs.operators import Mask, Operator
from mmdgs.operators.named import parse_operator
from mmdgs.studio.downloads import bundle, npy, npz, stored_png
from mmdgs.studio.pictures import spread_picture
from mmdgs.studio.sampling import shown_state
from mmdgs.studio.sources import in_colours_of, keep, kept, key_of, tensors

PAINTED = "paint a mask"
OPERATORS = {
    "a missing box": "box",
    "missing pixels": "random",
    "super-resolution": "sr",
    "blur": "blur",
    "motion blur": "motion",
    "grey to colour": "gray",
    PAINTED: "mask.png",
}
"""Degradations by what they are called in the room, and their names in commands."""
STRENGTHS = {"box": (4, 24, 12, 1), "random": (0.1, 0.95, 0.7, 0.05), "sr": (2, 8, 4, 2), "blur": (0.5, 3, 1.5, 0.1)}
STRENGTHS["motion"] = (3, 15, 9, 2)
"""Least, most, first and step of each strength: pixels, share, factor, standard deviation, length."""
WORDS = {"box": "side of the box (pixels)", "random": "share that is missing", "sr": "factor", "blur": "std (pixels)"}
WORDS["motion"] = "length (pixels)"
MOST_DRAWS, MOST_STEPS = 8, 50
DRAWS, STEPS, NOISE = 4, 15, 0.05
TOGETHER = 2
"""Draws that are made at a time."""


@dataclass(frozen=True)
class Wanted:
    """What is asked: an operator's text as commands have it, or mask.png with a mask; `clean` images are degraded."""

    model: str
    operator: str
    noise: float = NOISE
    draws: int = DRAWS
    steps: int = STEPS
    seed: int = 0
    clean: bool = True

    def __post_init__(self) -> None:
        for name, value, least, most in (("draws", self.draws, 1, MOST_DRAWS), ("steps", self.steps, 2, MOST_STEPS)):
            if not least <= value <= most:
                raise UsageError(f"{name} must be {least} to {most} here, got {value}; the command takes more")
        if not self.clean and self.operator != OPERATORS[PAINTED]:
            raise UsageError("an image that is damaged already is restored under a painted mask alone")

    def key(self, stored: numpy.ndarray, mask: numpy.ndarray | None, model: Model) -> str:
        """The name of the result for an image, by a model's weights."""
        painted = None if mask is None else numpy.packbits(mask).tobytes().hex()
        given = {"image": stored.tobytes().hex(), "mask": painted, "weights": model.digest}
        return key_of("restore", **asdict(self), **given, chains=MULTISTEP)


def operator_text(name: str, strength: float | None) -> str:
    """The operator of a command, such as sr:4, from the room's controls."""
    if name not in OPERATORS:
        raise UsageError(f"choose one of {', '.join(OPERATORS)}, got {name!r}")
    short = OPERATORS[name]
    return f"{short}:{strength:g}" if short in STRENGTHS else short


def painted_mask(paint: numpy.ndarray | None, shape: tuple[int, ...]) -> numpy.ndarray:
    """Which pixels are measured (H, W), from what was painted: alpha (rows, columns), of any size."""
    height, width = shape[-2:]
    if paint is None or not paint.any():
        raise UsageError("paint over the part of the image that is to be restored, and then restore it")
    strength = torch.from_numpy(paint.astype(numpy.float32))[None, None]
    share = torch.nn.functional.interpolate(strength, (height, width), mode="area")[0, 0] / 255
    measured = (share < 0.25).numpy()  # a quarter of a pixel is enough: its colour would leak otherwise
    if not measured.any():
        raise UsageError("the whole image is painted over: leave some of it")
    return measured


def operator_of(model: Model, wanted: Wanted, mask: numpy.ndarray | None) -> Operator:
    """The operator that is asked for."""
    if wanted.operator == OPERATORS[PAINTED]:
        if mask is None:
            raise UsageError("paint over the part of the image that is to be restored, and then restore it")
        return Mask(torch.from_numpy(mask), model.shape)
    return parse_operator(wanted.operator, model.shape, seed=wanted.seed)


@dataclass(frozen=True)
class Drawn:
    """Draws so far (n, C, H, W) in [0, 1] units, the measurement as an image, and draws under way, as noisy states."""

    truth: Tensor | None
    measurement: Tensor
    y: Tensor
    draws: Tensor
    under_way: Tensor | None = None
    done: tuple[int, int] = (0, 1)

    def scores(self) -> dict[str, float]:
        """How near the truth is, where there is one."""
        return {} if self.truth is None or not len(self.draws) else scores_of(self.draws[:, None], self.truth[None])


def restored(
    model: Model,
    stored: numpy.ndarray,
    wanted: Wanted,
    mask: numpy.ndarray | None = None,
    *,
    tell: Callable[[Drawn], Any] = lambda found: None,
    due: Callable[[], bool] = lambda: False,
) -> Drawn:
    """Draws of an image given its measurement; `tell` hears of finished draws, and of states whenever `due`."""
    found = operator_of(model, wanted, mask)
    image, _ = in_colours_of(model, stored, "image", clean=wanted.clean)
    x = image.image[None]
    y = simulated(x, found, wanted.noise, seed=wanted.seed) if wanted.clean else found(x)
    truth = x[0] if wanted.clean else None
    begun = Drawn(truth, as_image(found.known(y), x.shape[1:])[0], y[0], x[:0], done=(0, wanted.draws * wanted.steps))
    key = wanted.key(stored, mask, model)
    if (old := kept(key)) is not None:
        return Drawn(truth, begun.measurement, y[0], tensors(old)["draws"], done=(begun.done[1],) * 2)
    tell(begun)
    made: list[Tensor] = []
    low, high = model.interval

    def note(step: int, state: Any, info: Any, first: int) -> None:
        last, now = step + 1 == wanted.steps, (state.x.cpu() - low) / (high - low)
        done = (first * wanted.steps + (step + 1) * len(now), begun.done[1])
        if last:
            made.extend(now)
        if last or due():
            under_way = None if last else shown_state(now, _spread(model, wanted, step))
            tell(Drawn(truth, begun.measurement, y[0], torch.stack(made) if made else x[:0], under_way, done))

    result = restore(
        model,
        y,
        found,
        noise=wanted.noise,
        chains=MULTISTEP,
        steps=wanted.steps,
        draws=wanted.draws,
        seed=wanted.seed,
        batch_size=TOGETHER,
        callback=note,
        progress=None,
    )
    keep(key, {"draws": result.draws[:, 0].numpy()})
    return Drawn(truth, begun.measurement, y[0], result.draws[:, 0], done=(begun.done[1],) * 2)


def _spread(model: Model, wanted: Wanted, step: int) -> float:
    """The noise in states after a step, for values in [0, 1]."""
    from mmdgs.generation.methods import edm_levels

    following = edm_levels(model, wanted.steps)[step + 1]
    return following.ratio / (model.interval[1] - model.interval[0])


def pictures(seen: Drawn) -> list[tuple[str, numpy.ndarray]]:
    """What is shown, with words."""
    found = [] if seen.truth is None else [("the clean image", pixels(seen.truth))]
    found.append(("what was measured", pixels(seen.measurement)))
    if len(seen.draws):
        found.append((f"mean of {len(seen.draws)} draws", pixels(seen.draws.mean(0))))
    if len(seen.draws) > 1:
        found.append(spread_picture("where the draws differ", seen.draws.std(0)))
    found += [(f"draw {i + 1}", pixels(one)) for i, one in enumerate(seen.draws)]
    if seen.under_way is not None:
        found += [(f"draw {len(seen.draws) + i + 1}, under way", pixels(one)) for i, one in enumerate(seen.under_way)]
    return found


def download(seen: Drawn, stored: numpy.ndarray, wanted: Wanted, mask: numpy.ndarray | None) -> bytes:
    """A zip of the image, the measurement, the draws, and the lines that make them again."""
    python, command = lines(wanted)
    files = {
        "image.png": stored_png(stored),
        "measured.npy": npy(seen.y.numpy()),
        "draws.npz": npz({"draws": seen.draws.numpy(), "mean": seen.draws.mean(0).numpy()}),
        "mean.png": png(pixels(seen.draws.mean(0))),
        "again.py": (python + "\n").encode(),
        "again.txt": (command + "\n").encode(),
    }
    files |= {f"draw-{i + 1}.png": png(pixels(one)) for i, one in enumerate(seen.draws)}
    if mask is not None:
        files["mask.png"] = png((mask * 255).astype(numpy.uint8))
    return bundle("restored", files)


def lines(wanted: Wanted) -> tuple[str, str]:
    """The Python lines and the command that give the same; the files they name are in the download."""
    python = f"""import numpy, torch
import mmdgs
from mmdgs.operators.named import parse_operator

model = mmdgs.load("{wanted.model}")
operator = parse_operator("{wanted.operator}", model.shape, seed={wanted.seed})
y = torch.from_numpy(numpy.load("measured.npy"))[None]
found = mmdgs.restore(
    model, y, operator, noise={wanted.noise!r}, steps={wanted.steps}, draws={wanted.draws}, seed={wanted.seed}
)
print(found.draws, found.mean, found.std)"""
    simulate = " --simulate" if wanted.clean else ""
    return python, (
        f"mmdgs restore {wanted.model} image.png --operator {wanted.operator} --noise {wanted.noise:g}{simulate} "
        f"--draws {wanted.draws} --steps {wanted.steps} --seed {wanted.seed} --out restored"
    )
