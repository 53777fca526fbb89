"""Recipes: what to train on what, from a file and overrides.

A recipe is a flat table of keys, in YAML or TOML: those of `Recipe` (data, model, loss) and those of
`TrainingSettings` (steps, batch_size, learning_rate ...); `network` holds options over the model's preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmdgs import losses
from mmdgs.errors import UsageError
from mmdgs.models.config import CLASSES, MEAN_STD, VARIANCE_RATIO, check_level, check_param
from mmdgs.networks.registry import nearest, preset
from mmdgs.schedules import parse_levels
from mmdgs.training.levels import DRAWS
from mmdgs.training.settings import TrainingSettings

LOSSES = ("dsm", "kl", "cross-entropy", "ocm")
OCM_PROBES = 3
INIT_WARMUP = 100
"""Steps of warm-up of a run that starts from a model, if none were asked for: the first steps of a new Adam are as
long as the learning rate in every direction, however small the gradient there."""


@dataclass(frozen=True)
class Recipe:
    """What to train on what; `training` says how."""

    data: str = "mnist"
    data_dir: str | None = None
    size: int | None = None
    limit: int | None = None
    flips: bool | None = None  # none: where mirrored images are as good (CIFAR-10, faces)
    unreadable: str = "refuse"
    model: str = "unet-small"
    network: dict[str, Any] = field(default_factory=dict)
    param: str = "energy"
    loss: str | None = None  # none: the one that goes with the parametrisation
    sigma: float | None = None
    alpha: float = 1.0
    levels: str | None = None  # in place of sigma: many levels, such as geometric:232:50:0.01
    weighting: str | None = None  # of the levels in the loss dsm; none: the one that goes with the parametrisation
    level_draw: str | None = None  # how an example's level is drawn from many; none: uniform
    level_jitter: float | None = None  # the level that a network of many is told is off by up to this, in log sigma
    denoiser: str | None = (
        None  # of the loss ocm: the model whose variances are learned, anything from_pretrained takes
    )
    probes: int | None = None  # of the loss ocm: products with the Jacobian for each example; none: 3
    init: str | None = None  # a model of the same architecture to start from, anything mmdgs.load takes
    compile: bool | None = None  # none: on a GPU
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(batch_size=64, learning_rate=1e-3, warmup=50, decay=True, ema=0.999)
    )

    def __post_init__(self) -> None:
        check_param(self.param)
        if self.sigma is not None:
            check_level(self.alpha, self.sigma)
        wanted = {MEAN_STD: "kl", CLASSES: "cross-entropy", VARIANCE_RATIO: "ocm"}.get(self.param, "dsm")
        if self.loss is None:
            object.__setattr__(self, "loss", wanted)
        if self.loss not in LOSSES:
            raise UsageError(
                f"unknown loss {self.loss!r}{nearest(str(self.loss), LOSSES)}; choose one of {', '.join(LOSSES)}"
            )
        if self.loss != wanted:
            raise UsageError(
                f"the parametrisation {self.param!r} is trained with the loss {wanted!r}, got {self.loss!r}"
            )
        preset(self.model)
        if self.init is not None and self.training.warmup == 0:
            object.__setattr__(self, "training", dataclasses.replace(self.training, warmup=INIT_WARMUP))
        self._check_denoiser()
        self._check_levels()

    def _check_denoiser(self) -> None:
        """A head's denoiser says its levels; for other losses there is none."""
        if self.loss != "ocm":
            for name in ("denoiser", "probes"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} is for the loss 'ocm', and this is {self.loss!r}: leave it out")
            return
        if self.denoiser is None:
            raise UsageError(
                "the loss 'ocm' trains a head for a denoiser: say which with --denoiser, a folder, checkpoint or name "
                "that mmdgs.from_pretrained takes, such as mnist"
            )
        if self.sigma is not None or self.alpha != 1:
            raise UsageError("a head is trained at its denoiser's noise levels: leave sigma and alpha out")
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be at least 1, got {self.probes}")
        object.__setattr__(self, "probes", self.probes or OCM_PROBES)

    def _check_levels(self) -> None:
        """Refuse keys of one level beside those of many, and fill in what goes with many."""
        for name, choices in (("weighting", losses.WEIGHTINGS), ("level_draw", DRAWS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                like = nearest(value, choices)
                raise UsageError(f"unknown {name} {value!r}{like}; choose one of {', '.join(choices)}")
        if self.level_jitter is not None and not 0 <= self.level_jitter < 1:
            raise UsageError(f"level_jitter must be at least 0 and below 1, got {self.level_jitter}")
        if self.level_jitter is not None and (self.loss != "dsm" or self.levels is None):
            raise UsageError("level_jitter is for the loss 'dsm' at many levels: leave it out, or give levels")
        if self.weighting is not None and self.loss != "dsm":
            raise UsageError(f"weighting is for the loss 'dsm', and this is {self.loss!r}: leave it out")
        if self.levels is None:
            if self.level_draw is not None and self.loss != "ocm":
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
        if self.weighting is None and self.loss == "dsm":
            object.__setattr__(self, "weighting", "edm" if self.param == "edm" else "ncsnv2")
        object.__setattr__(self, "level_draw", self.level_draw or "uniform")

    def to_dict(self) -> dict[str, Any]:
        """The flat table of this recipe."""
        table = dataclasses.asdict(self)
        return table | table.pop("training")

    def published(self) -> Recipe:
        """The recipe as models tell of it: files by their names, without the folders of the machine they were on."""
        denoiser, init = (name and _without_folders(name) for name in (self.denoiser, self.init))
        return dataclasses.replace(self, data=_without_folders(self.data), denoiser=denoiser, init=init)

    def command(self, out: str = "OUT") -> str:
        """The command line that trains this recipe."""
        default = Recipe(param=self.param, sigma=self.sigma, levels=self.levels, denoiser=self.denoiser).to_dict()
        words = ["mmdgs", "train", "--data", self.data, "--model", self.model, "--param", self.param]
        words += ["--loss", str(self.loss), *([] if self.sigma is None else ["--sigma", str(self.sigma)])]
        words += [] if self.levels is None else ["--levels", self.levels]
        words += [] if self.weighting is None else ["--weighting", self.weighting]
        words += [] if self.denoiser is None else ["--denoiser", self.denoiser]
        words += [] if self.init is None else ["--init", self.init]
        skip = {
            "data",
            "data_dir",
            "model",
            "param",
            "loss",
            "sigma",
            "levels",
            "weighting",
            "network",
            "denoiser",
            "init",
        }
        settings = {key: value for key, value in self.to_dict().items() if key not in skip and value != default[key]}
        settings |= {f"network.{key}": value for key, value in self.network.items()}
        for key, value in settings.items():
            words += ["--set", f"{key}={'none' if value is None else str(value).replace(', ', ',')}"]
        return f"{shlex.join(words)} --out {out}"


def _without_folders(name: str) -> str:
    """The last part of an absolute path; other names, and paths from where a run was started, as they are."""
    return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name


def _known_keys() -> dict[str, Any]:
    """Every key of a recipe, with its type."""
    hints = typing.get_type_hints(Recipe) | typing.get_type_hints(TrainingSettings)
    return {key: hint for key, hint in hints.items() if key != "training"}


def _checked(key: str, value: Any, hint: Any) -> Any:
    """A value of the type a key wants; a whole number may stand for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    bases = tuple(typing.get_origin(one) or one for one in allowed)
    if float in bases and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-4 as text
    if int in bases and isinstance(value, float) and value.is_integer() and float not in bases:
        value = int(value)
    fits = isinstance(value, bases) and not (isinstance(value, bool) and bool not in bases)
    if not fits:
        names = " or ".join("none" if base is type(None) else base.__name__ for base in bases)
        raise UsageError(f"{key} must be {names}, got {value!r}")
    return value


def make_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """A recipe from a flat table of keys; an unknown key is refused with the nearest name."""
    known = _known_keys()
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in ((str(key), value) for key, value in table.items()):  # YAML has keys that are no words
        if key.startswith("network."):
            options[key.removeprefix("network.")] = value
        elif key not in known:
            raise UsageError(f"{where} has an unknown key {key!r}{nearest(key, known)}")
        else:
            values[key] = _checked(key, value, known[key])
    settings = {f.name for f in dataclasses.fields(TrainingSettings)}
    base = Recipe().training
    loop = {key: value for key, value in values.items() if key in settings}
    if "steps" not in loop and ("epochs" in loop or "minutes" in loop):
        loop["steps"] = None
    training = dataclasses.replace(base, **loop)
    rest = {key: value for key, value in values.items() if key not in settings}
    rest["network"] = {**rest.get("network", {}), **options}
    if rest.get("loss") == "ocm":
        rest.setdefault("param", VARIANCE_RATIO)
    return Recipe(**rest, training=training)


def read_recipe(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from a YAML or TOML file (or none: the defaults), with overrides."""
    table: dict[str, Any] = {}
    if path is not None:
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        except OSError as error:
            raise UsageError(f"cannot read the recipe {path}: {error.strerror or error}") from error
        except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the recipe {path} is no {'TOML' if path.suffix == '.toml' else 'YAML'}: {error}"
            ) from error
        if not isinstance(found, dict):
            raise UsageError(f"the recipe {path} must be a table of keys and values, got {type(found).__name__}")
        table = found
    return make_recipe({**table, **(overrides or {})}, str(path) if path else "the command line")


def parse_override(text: str) -> tuple[str, Any]:
    """key=value as given on the command line, the value read as YAML; `none` is None."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set takes key=value, such as --set steps=2000, got {text!r}")
    try:
        return key.strip(), None if value.strip().lower() == "none" else yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"the value of --set {text!r} cannot be read: {error}") from error
