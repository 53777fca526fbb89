"""Recipes: what to train on what, and how, from a file and overrides.

A recipe is a flat table of keys, in YAML or TOML: the fields of `Recipe` and `TrainingSettings`,
which are the options of `mmdgs train`. `network` holds options over the model's preset. Importing
this module needs no torch; making a recipe does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError, nearest, shown, unknown_name
from mmdgs.options import key, option, option_names
from mmdgs.reading import parse_toml, parse_yaml, reading
from mmdgs.runtime import check_precision

OPTIMISERS = ("adam", "muon")
LOSSES = ("dsm", "kl", "cross-entropy", "ocm", "covariance")
HEAD_LOSSES = ("ocm", "covariance")
OCM_PROBES = 3
MOST_WHOLE = 1 << 63
INIT_WARMUP = 100
"""Default steps of warm-up of a run that starts from a model: the first steps of a new Adam are as
long as the learning rate in every direction, however small the gradient there."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the authors' for the 2-D networks.

    A run ends after `steps`, `epochs` or `minutes`, whichever comes first; with `decay` the
    learning rate falls along a cosine to zero at that end. Minutes of the clock cover training,
    validating and watching; the last look and the writing of the model come after them.
    """

    steps: int | None = option(10_000, "End after so many steps.")
    epochs: float | None = option(None, "End after so many passes over the data.")
    minutes: float | None = option(None, "End after so much time, watching included.")
    batch_size: int = option(100, "Examples a step, over all processes.")
    optimiser: str = key("adam", "adam or muon.")
    learning_rate: float = option(1e-4, "The optimiser's step size.")
    warmup: int = key(0, "Steps of linear growth of the learning rate.")
    decay: bool = key(False, "Cosine decay of the learning rate to zero.")
    clip: float | None = key(None, "Largest norm of the gradient.")
    ema: float | None = key(None, "Decay of the exponential moving average of the weights.")
    precision: str = option("float32", "float32, tf32 or bf16.")
    split: int = key(1, "Parts a batch is cut into; grows where a step does not fit in memory.")
    watch: int | None = option(
        None, "Judge so many samples every watch_every steps [0: off].", show_default=False
    )
    seed: int = option(0, "Seed of everything random.", min=0, max=2**31 - 1)
    checkpoint_every: int | None = key(1_000, "Steps between two checkpoints; none: at the end.")
    validate_every: int | None = key(1_000, "Steps between two validations; none: at the end only.")
    watch_every: int | None = key(5_000, "Steps between two looks at samples; none: at the end.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "watch", self.watch or None)
        for name in ("steps", "epochs", "minutes", "batch_size", "learning_rate", "clip", "split"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be positive and finite, got {value}")
        least = {"checkpoint_every": 1, "validate_every": 1, "watch_every": 1, "watch": 2}
        for name, minimum in {**least, "warmup": 0}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {value}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema must lie between 0 and 1, got {self.ema}")
        check_precision(self.precision)
        if self.optimiser not in OPTIMISERS:
            raise unknown_name("optimiser", self.optimiser, OPTIMISERS)
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise UsageError("say when training ends: steps, epochs or minutes")

    def last_step(self, steps_an_epoch: int) -> int | None:
        """The step after which training ends, where steps or epochs say so."""
        epochs = None if self.epochs is None else math.ceil(self.epochs * steps_an_epoch)
        return min((end for end in (self.steps, epochs) if end is not None), default=None)

    def rate(self, step: int, fraction: float) -> float:
        """The learning rate at a step, `fraction` of the whole run done."""
        rate = self.learning_rate * min(1.0, (step + 1) / (self.warmup + 1))
        return rate * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))) if self.decay else rate


@dataclass(frozen=True)
class Recipe:
    """What to train on what; `training` says how. Checked and completed when it is made."""

    data: str = option(
        "mnist", "mnist, cifar10, celeba, mog, rings, roll, or a folder or zip of images."
    )
    data_dir: str | None = option(None, "Where data files are.", envvar="MMDGS_DATA")
    size: int | None = option(None, "Crop and resize images to this many pixels.")
    crop: int | None = key(
        None, "Train on square parts of so many pixels a side: for models of any size."
    )
    turns: bool = key(False, "Of crop: turn images by 0, 90, 180 or 270 degrees.")
    smaller: int = key(0, "Of crop: so many copies of each image, its sides times 0.6 to 0.95.")
    limit: int | None = key(None, "Most examples to train on.")
    flips: bool | None = key(None, "Mirror half of the images; none: of CIFAR-10 and faces.")
    unreadable: str = option("refuse", "An unreadable image: refuse it, or skip it.")
    model: str = option(
        "unet-small",
        "unet-small, unet-paper, unet-photo, unet-tiny, ncsnv2, mlp, classifier or spectrum-head.",
    )
    network: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Options over those of the model."}
    )
    param: str = option(
        "energy",
        "The output: energy, energy-squared, score, noise, clean, velocity, edm, mean-std, "
        "classes; of heads variance-ratio, covariance.",
    )
    loss: str | None = option(None, "dsm, kl, cross-entropy, ocm or covariance; goes with --param.")
    denoiser: str | None = option(
        None, "Of --loss ocm or covariance: the model whose variances a head learns."
    )
    probes: int | None = option(None, "Of --loss ocm: Jacobian products for each example [3].")
    sigma: float | None = option(None, "Standard deviation of the noise.")
    alpha: float = key(1.0, "What the data are multiplied by before noise is added.")
    levels: str | None = option(
        None, "Many levels in place of --sigma: geometric:232:50:0.01, linear, cosine, edm:18."
    )
    weighting: str | None = option(None, "Of the levels in the loss: ncsnv2, noise, edm, score.")
    level_draw: str | None = key(
        None,
        "How a level is drawn from many: uniform; lognormal or mixed, with a median (mixed:0.12).",
    )
    level_jitter: float | None = key(
        None, "The level that the network is given is off by up to this, in log sigma."
    )
    init: str | None = option(
        None, "Start from the weights of a model of the same architecture (a folder, a name)."
    )
    compile: bool | None = key(None, "Compile the network; none: on a GPU.")
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(
            batch_size=64, learning_rate=1e-3, warmup=50, decay=True, ema=0.999
        )
    )

    def __post_init__(self) -> None:
        from mmdgs.data import TOYS
        from mmdgs.losses import WEIGHTINGS
        from mmdgs.models import config
        from mmdgs.networks.registry import preset
        from mmdgs.schedules import parse_levels
        from mmdgs.training.objective import draw_named

        config.check_param(self.param)
        for name in ("size", "flips", "unreadable", "crop") if self.data in TOYS else ():
            if getattr(self, name) != Recipe.__dataclass_fields__[name].default:
                raise UsageError(f"{name} is for images, and {self.data!r} has points: remove it")
        if self.sigma is not None:
            config.check_level(self.alpha, self.sigma)
        losses = {config.MEAN_STD: "kl", config.CLASSES: "cross-entropy"}
        losses |= {config.VARIANCE_RATIO: "ocm", config.COVARIANCE: "covariance"}
        own_loss = losses.get(self.param, "dsm")
        self._fill("loss", own_loss)
        for name, choices in (("loss", LOSSES), ("weighting", WEIGHTINGS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown_name(name, value, choices)
        if self.level_draw is not None:
            draw_named(self.level_draw)
        preset(self.model)
        self._check_together(own_loss)
        if self.levels is not None:
            parse_levels(self.levels)
            self._fill("level_draw", "uniform")
            if self.loss == "dsm":
                self._fill("weighting", "edm" if self.param == "edm" else "ncsnv2")
        if self.loss == "ocm":
            self._fill("probes", OCM_PROBES)
        if self.init is not None and self.training.warmup == 0:
            training = dataclasses.replace(self.training, warmup=INIT_WARMUP)
            object.__setattr__(self, "training", training)

    def _fill(self, name: str, value: Any) -> None:
        """Set what was left open."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_together(self, own_loss: str) -> None:
        """UsageError for keys that do not go together; `own_loss` is that of the output."""
        loss, head, many = self.loss, self.loss in HEAD_LOSSES, self.levels is not None
        single = self.sigma is not None or self.alpha != 1
        jitter, probes = self.level_jitter, self.probes
        both = f"levels {self.levels!r} and sigma {self.sigma}, alpha {self.alpha}"
        rules = (
            (
                self.crop is not None and (self.size is not None or self.crop < 1),
                f"crop must be positive, and excludes size; got crop {self.crop}, size {self.size}",
            ),
            (self.turns and self.crop is None, "turns is for crops: give crop, or leave it out"),
            (
                self.smaller < 0 or (self.smaller and self.crop is None),
                f"smaller is a count, for crops: give crop, or leave it out; got {self.smaller}",
            ),
            (
                self.crop is not None and (head or self.param == "classes"),
                f"crop is for denoisers, and param is {self.param!r}: leave it out",
            ),
            (loss != own_loss, f"param {self.param!r} needs the loss {own_loss!r}, got {loss!r}"),
            (
                self.denoiser and not head,
                f"denoiser is for the loss 'ocm' or 'covariance', not {loss!r}: leave it out",
            ),
            (probes is not None and loss != "ocm", "probes is for the loss 'ocm': leave it out"),
            (probes is not None and probes < 1, f"probes must be at least 1, got {probes}"),
            (self.weighting and loss != "dsm", "weighting is for the loss 'dsm': leave it out"),
            (head and not self.denoiser, f"the loss {loss!r} trains a head: give its --denoiser"),
            (head and single, "a head has its denoiser's noise levels: leave sigma and alpha out"),
            (jitter and not 0 <= jitter < 1, f"level_jitter must be in [0, 1), got {jitter}"),
            (
                jitter is not None and not (loss == "dsm" and many),
                "level_jitter is for the loss 'dsm' at many levels: leave it out",
            ),
            (self.level_draw and not (many or head), "level_draw is for many levels: give levels"),
            (many and loss == "cross-entropy", "a classifier has no levels: leave levels out"),
            (many and single, f"give one level (sigma, alpha) or many (levels), got {both}"),
        )
        for wrong, message in rules:
            if wrong:
                raise UsageError(message)

    def to_dict(self) -> dict[str, Any]:
        """The flat table of this recipe."""
        table = dataclasses.asdict(self)
        return table | table.pop("training")

    def published(self) -> Recipe:
        """The recipe as models record it: absolute paths by their last part."""
        denoiser, init = (name and _without_folders(name) for name in (self.denoiser, self.init))
        data = _without_folders(self.data)
        return dataclasses.replace(self, data=data, denoiser=denoiser, init=init)

    def command(self, out: str = "OUT") -> str:
        """The command line that trains this recipe: its main keys, and what is not the default."""
        levels: dict[str, Any] = {"sigma": self.sigma, "levels": self.levels}
        default = Recipe(param=self.param, denoiser=self.denoiser, **levels).to_dict()
        words = ["mmdgs", "train"]
        table = self.to_dict()
        network = {f"network.{name}": value for name, value in table.pop("network").items()}
        for name, value in (table | network).items():
            if name == "data_dir" or (value is None and name in SHOWN):
                continue
            if name in default and value == default[name] and name not in SHOWN:
                continue
            if name in OPTIONS and value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
            else:
                text = "none" if value is None else str(value).replace(", ", ",")
                words += ["--set", f"{name}={text}"]
        return f"{shlex.join(words)} --out {out}"


SHOWN = (
    "data", "model", "param", "loss", "sigma", "levels", "weighting", "denoiser", "init"
)  # fmt: skip
"""Keys that the command of a recipe always has."""
OPTIONS = option_names(Recipe, TrainingSettings)
"""Keys that `mmdgs train` has an option for; the others are given by --set."""


def _without_folders(name: str) -> str:
    """The last part of an absolute path; other names and relative paths as they are."""
    return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name


def _checked(key: str, value: Any, hint: Any) -> Any:
    """A value of a key's type; a whole number may stand for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    bases = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if float in bases and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-4 as text
    if int in bases and isinstance(value, float) and value.is_integer() and float not in bases:
        value = int(value)
    if not isinstance(value, bases) or (isinstance(value, bool) and bool not in bases):
        names = " or ".join("none" if base is type(None) else base.__name__ for base in bases)
        raise UsageError(f"{key} must be {names}, got {shown(value)}")
    if isinstance(value, int) and abs(value) >= MOST_WHOLE:
        raise UsageError(f"{key} must be smaller than 2**63, got {shown(value)}")
    return value


def make_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """A recipe from a flat table of keys; UsageError with the nearest name for an unknown key."""
    from mmdgs.models.config import COVARIANCE, VARIANCE_RATIO

    loop = typing.get_type_hints(TrainingSettings)
    known = typing.get_type_hints(Recipe) | loop
    del known["training"]
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in ((str(name), value) for name, value in table.items()):  # 1: is a key, too
        if name.startswith("network."):
            options[name.removeprefix("network.")] = value
        elif name not in known:
            raise UsageError(f"{where} has an unknown key {name!r}{nearest(name, known)}")
        else:
            values[name] = _checked(name, value, known[name])
    if "epochs" in values or "minutes" in values:
        values.setdefault("steps", None)
    if values.get("loss") in HEAD_LOSSES:
        values.setdefault("param", VARIANCE_RATIO if values["loss"] == "ocm" else COVARIANCE)
    if values.get("loss") == "covariance":
        values.setdefault("model", "spectrum-head")
    values["network"] = {**values.get("network", {}), **options}
    for name, value in values["network"].items():
        if isinstance(value, dict):
            raise UsageError(f"network.{name} must be a number, a word or a list, got a table")
    loop_values = {name: values.pop(name) for name in loop if name in values}
    return Recipe(**values, training=dataclasses.replace(Recipe().training, **loop_values))


def read_recipe(
    path: Path | str | None = None, overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe from a YAML or TOML file (or none: the defaults), with overrides."""
    if path is None:
        return make_recipe(overrides or {}, "the command line")
    from mmdgs.files import read_text

    path = Path(path)
    parse = parse_toml if path.suffix == ".toml" else parse_yaml
    table = parse(read_text(path), f"the recipe {path}")
    if not isinstance(table, dict):
        got = type(table).__name__
        raise UsageError(f"the recipe {path} must be a table of keys and values, got {got}")
    with reading(path, "a recipe"):
        return make_recipe({**table, **(overrides or {})}, str(path))


def parse_override(text: str) -> tuple[str, Any]:
    """key=value as given on the command line, the value read as YAML; `none` is None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set takes key=value, such as --set steps=2000, got {text!r}")
    none = value.strip().lower() == "none"
    return name.strip(), None if none else parse_yaml(value, f"the value of --set {text!r}")
