"""Recipes: what to train on what, and how, from a file and overrides.

A recipe is a flat table of keys, in YAML or TOML: those of `Recipe` (data, model, loss) and those of
`TrainingSettings` (steps, batch_size, learning_rate ...); `network` holds options over the model's preset.

The fields are the options of `mmdgs train`. Importing them needs no torch; a recipe that is made does.
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
"""Steps of warm-up of a run that starts from a model, if none were asked for: the first steps of a new Adam are as
long as the learning rate in every direction, however small the gradient there."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the authors' for the 2-D networks (10,000 steps of 100, Adam 1e-4).

    A run ends after `steps`, after `epochs`, or after `minutes`, whichever comes first; with `decay` the learning rate
    falls along a cosine to zero at that end. Minutes are those of a clock: of training, validating and watching; the
    last look and the writing of the model come after them.
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
    split: int = key(1, "Parts a batch is cut into; grows by itself where a step does not fit in memory.")
    watch: int | None = option(None, "Judge so many samples every watch_every steps [0: off].", show_default=False)
    seed: int = option(0, "Seed of everything random.", min=0, max=2**31 - 1)
    checkpoint_every: int | None = key(1_000, "Steps between two checkpoints; none: at the end, or when stopped.")
    validate_every: int | None = key(1_000, "Steps between two validations; none: at the end only.")
    watch_every: int | None = key(5_000, "Steps between two looks at samples; none: at the end only.")

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minutes", "batch_size", "learning_rate", "clip", "split"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be positive and finite, got {value}")
        for name in ("checkpoint_every", "validate_every", "watch_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, or none, got {value}")
        if self.warmup < 0:
            raise UsageError(f"warmup must not be negative, got {self.warmup}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema must lie between 0 and 1, got {self.ema}")
        object.__setattr__(self, "watch", self.watch or None)
        if self.watch is not None and self.watch < 2:
            raise UsageError(f"watch must be at least 2 samples, or 0 for none, got {self.watch}")
        check_precision(self.precision)
        if self.optimiser not in OPTIMISERS:
            raise unknown_name("optimiser", self.optimiser, OPTIMISERS)
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise UsageError("say when training ends: steps, epochs or minutes")

    def last_step(self, steps_an_epoch: int) -> int | None:
        """The step after which training ends, where steps or epochs say so."""
        ends = [self.steps] if self.steps is not None else []
        ends += [math.ceil(self.epochs * steps_an_epoch)] if self.epochs is not None else []
        return min(ends) if ends else None

    def rate(self, step: int, fraction: float) -> float:
        """The learning rate at a step, `fraction` of the whole run done."""
        rate = self.learning_rate * min(1.0, (step + 1) / (self.warmup + 1))
        return rate * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))) if self.decay else rate


@dataclass(frozen=True)
class Recipe:
    """What to train on what; `training` says how. Checked when it is made; what was left open is then filled in."""

    data: str = option("mnist", "mnist, cifar10, celeba, mog, rings, roll, or a folder or zip of images.")
    data_dir: str | None = option(None, "Where data files are.", envvar="MMDGS_DATA")
    size: int | None = option(None, "Crop and resize images to this many pixels.")
    limit: int | None = key(None, "Most examples to train on.")
    flips: bool | None = key(None, "Mirror half of the images; none: where that is as good (CIFAR-10, faces).")
    unreadable: str = option("refuse", "An unreadable image: refuse it, or skip it.")
    model: str = option("unet-small", "unet-small, unet-paper, unet-tiny, ncsnv2, mlp, classifier or spectrum-head.")
    network: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options over those of the model."})
    param: str = option(
        "energy",
        "The output: energy, energy-squared, score, noise, clean, velocity, edm, mean-std, classes; of heads "
        "variance-ratio, covariance.",
    )
    loss: str | None = option(None, "dsm, kl, cross-entropy, ocm or covariance; goes with --param.")
    denoiser: str | None = option(
        None, "Of --loss ocm or covariance: the model whose variances a head learns (a folder, mnist ...)."
    )
    probes: int | None = option(None, "Of --loss ocm: Jacobian products for each example [3].")
    sigma: float | None = option(None, "Standard deviation of the noise.")
    alpha: float = key(1.0, "What the data are multiplied by before noise is added.")
    levels: str | None = option(None, "Many levels in place of --sigma: geometric:232:50:0.01, linear, cosine, edm:18.")
    weighting: str | None = option(None, "Of the levels in the loss: ncsnv2, noise, edm, score.")
    level_draw: str | None = key(None, "How an example's level is drawn from many: uniform, lognormal, mixed.")
    level_jitter: float | None = key(None, "The level that the network is told is off by up to this, in log sigma.")
    init: str | None = option(None, "Start from the weights of a model of the same architecture (a folder, a name).")
    compile: bool | None = key(None, "Compile the network; none: on a GPU.")
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(batch_size=64, learning_rate=1e-3, warmup=50, decay=True, ema=0.999)
    )

    def __post_init__(self) -> None:
        from mmdgs.data import TOYS
        from mmdgs.losses import WEIGHTINGS
        from mmdgs.models.config import CLASSES, COVARIANCE, MEAN_STD, VARIANCE_RATIO, check_level, check_param
        from mmdgs.networks.registry import preset
        from mmdgs.training.objective import DRAWS

        check_param(self.param)
        for name in ("size", "flips", "unreadable") if self.data in TOYS else ():
            if getattr(self, name) != Recipe.__dataclass_fields__[name].default:
                raise UsageError(f"{name} is for images, and {self.data!r} has points: leave it out")
        if self.sigma is not None:
            check_level(self.alpha, self.sigma)
        named = {MEAN_STD: "kl", CLASSES: "cross-entropy", VARIANCE_RATIO: "ocm", COVARIANCE: "covariance"}
        wanted = named.get(self.param, "dsm")
        self._fill("loss", wanted)
        for name, choices in (("loss", LOSSES), ("weighting", WEIGHTINGS), ("level_draw", DRAWS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown_name(name, value, choices)
        if self.loss != wanted:
            raise UsageError(
                f"the parametrisation {self.param!r} is trained with the loss {wanted!r}, got {self.loss!r}"
            )
        preset(self.model)
        if self.init is not None and self.training.warmup == 0:
            object.__setattr__(self, "training", dataclasses.replace(self.training, warmup=INIT_WARMUP))
        for name, losses in (("denoiser", HEAD_LOSSES), ("probes", ("ocm",)), ("weighting", ("dsm",))):
            if getattr(self, name) is not None and self.loss not in losses:
                raise UsageError(
                    f"{name} is for the loss {' or '.join(map(repr, losses))}, and this is {self.loss!r}: leave it out"
                )
        if self.loss in HEAD_LOSSES:
            self._check_head()
        self._check_levels()

    def _fill(self, name: str, value: Any) -> None:
        """Set what was left open."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_head(self) -> None:
        """A head's denoiser says its levels."""
        if self.denoiser is None:
            raise UsageError(
                f"the loss {self.loss!r} trains a head for a denoiser: say which with --denoiser, a folder, checkpoint "
                "or name that mmdgs.from_pretrained takes, such as mnist"
            )
        if self.sigma is not None or self.alpha != 1:
            raise UsageError("a head is trained at its denoiser's noise levels: leave sigma and alpha out")
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be at least 1, got {self.probes}")
        if self.loss == "ocm":
            self._fill("probes", OCM_PROBES)

    def _check_levels(self) -> None:
        """Refuse keys of one level beside those of many, and fill in what goes with many."""
        from mmdgs.schedules import parse_levels

        if self.level_jitter is not None and not 0 <= self.level_jitter < 1:
            raise UsageError(f"level_jitter must be at least 0 and below 1, got {self.level_jitter}")
        if self.level_jitter is not None and (self.loss != "dsm" or self.levels is None):
            raise UsageError("level_jitter is for the loss 'dsm' at many levels: leave it out, or give levels")
        if self.levels is None:
            if self.level_draw is not None and self.loss not in HEAD_LOSSES:
                raise UsageError("level_draw is for many levels: give levels, or leave it out")
            return
        parse_levels(self.levels)
        if self.loss == "cross-entropy":
            raise UsageError("a classifier has no noise levels: leave levels out")
        if self.sigma is not None or self.alpha != 1:
            raise UsageError(
                f"give one noise level (sigma, alpha) or many (levels), got both: {self.levels!r}, "
                f"sigma {self.sigma} and alpha {self.alpha}"
            )
        if self.loss == "dsm":
            self._fill("weighting", "edm" if self.param == "edm" else "ncsnv2")
        self._fill("level_draw", "uniform")

    def to_dict(self) -> dict[str, Any]:
        """The flat table of this recipe."""
        table = dataclasses.asdict(self)
        return table | table.pop("training")

    def published(self) -> Recipe:
        """The recipe as models tell of it: files by their names, without the folders of the machine they were on."""
        denoiser, init = (name and _without_folders(name) for name in (self.denoiser, self.init))
        return dataclasses.replace(self, data=_without_folders(self.data), denoiser=denoiser, init=init)

    def command(self, out: str = "OUT") -> str:
        """The command line that trains this recipe: what makes it out, and what is not the default."""
        default = Recipe(param=self.param, sigma=self.sigma, levels=self.levels, denoiser=self.denoiser).to_dict()
        always = ("data", "model", "param", "loss", "sigma", "levels", "weighting", "denoiser", "init")
        wanted = {name: value for name, value in self.to_dict().items() if value != default[name] or name in always}
        wanted.pop("network", None)
        wanted |= {f"network.{name}": value for name, value in self.network.items()}
        words = ["mmdgs", "train"]
        for name, value in wanted.items():
            if name == "data_dir" or (value is None and name in always):
                continue
            if name in OPTIONS and value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
            else:
                words += ["--set", f"{name}={'none' if value is None else str(value).replace(', ', ',')}"]
        return f"{shlex.join(words)} --out {out}"


OPTIONS = option_names(Recipe, TrainingSettings)
"""Keys that `mmdgs train` has an option for; the others are given by --set."""


def _without_folders(name: str) -> str:
    """The last part of an absolute path; other names, and paths from where a run was started, as they are."""
    return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name


def _checked(key: str, value: Any, hint: Any) -> Any:
    """A value of the type a key wants; a whole number may stand for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    bases = tuple(typing.get_origin(one) or one for one in allowed)
    if float in bases and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-4 as text
    if int in bases and isinstance(value, float) and value.is_integer() and float not in bases:
        value = int(value)
    fits = isinstance(value, bases) and not (isinstance(value, bool) and bool not in bases)
    if not fits:
        names = " or ".join("none" if base is type(None) else base.__name__ for base in bases)
        raise UsageError(f"{key} must be {names}, got {shown(value)}")
    if isinstance(value, int) and abs(value) >= MOST_WHOLE:
        raise UsageError(f"{key} must be smaller than 2**63, got {shown(value)}")
    return value


def make_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """A recipe from a flat table of keys; an unknown key is refused with the nearest name."""
    from mmdgs.models.config import COVARIANCE, VARIANCE_RATIO

    loop = typing.get_type_hints(TrainingSettings)
    known = {name: hint for name, hint in typing.get_type_hints(Recipe).items() if name != "training"} | loop
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in ((str(name), value) for name, value in table.items()):  # YAML has keys that are no words
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
            raise UsageError(f"network.{name} must be a number, a word or a list of them, got a table")
    training = dataclasses.replace(Recipe().training, **{n: values.pop(n) for n in loop if n in values})
    return Recipe(**values, training=training)


def read_recipe(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from a YAML or TOML file (or none: the defaults), with overrides."""
    if path is None:
        return make_recipe(overrides or {}, "the command line")
    from mmdgs.files import read_text

    path = Path(path)
    text = read_text(path)
    table = (parse_toml if path.suffix == ".toml" else parse_yaml)(text, f"the recipe {path}")
    if not isinstance(table, dict):
        raise UsageError(f"the recipe {path} must be a table of keys and values, got {type(table).__name__}")
    with reading(path, "a recipe"):
        return make_recipe({**table, **(overrides or {})}, str(path))


def parse_override(text: str) -> tuple[str, Any]:
    """key=value as given on the command line, the value read as YAML; `none` is None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set takes key=value, such as --set steps=2000, got {text!r}")
    return name.strip(), None if value.strip().lower() == "none" else parse_yaml(value, f"the value of --set {text!r}")
