"""What a run starts from, and what a model keeps of all the runs it was trained in.

A run with `init` takes the averaged weights of an earlier model: tensors of the same names and shapes, for the same
kind of output. The optimiser starts anew. A checkpoint keeps the origin, so that a run that goes on need not have the
earlier model any more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.models import CLASSES, Model, load, load_weights, weights_digest

UNKNOWN = {"command": "not recorded"}
"""The run of a model that says nothing of its training."""
FREE_OPTIONS = ("dropout",)
"""Options of a network that weights do not depend on."""
SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Origin:
    """The runs before this one, the images they saw (none: not known), and what is taken over besides weights."""

    runs: tuple[dict[str, Any], ...] = ()
    images: int | None = 0
    weights: str = ""  # the digest's first digits
    head: dict[str, Any] = field(default_factory=dict)  # an earlier head's scale, which its outputs are relative to

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Origin:
        return cls(**{**content, "runs": tuple(content.get("runs", ()))})

    def taken_over(self, model: Model) -> Model:
        """The model with what its outputs are relative to, where that was the earlier model's."""
        return Model.build(dataclasses.replace(model.config, head=self.head), model.network) if self.head else model

    def after(self, model: Model, record: dict[str, Any]) -> Model:
        """The model with this run's record after those before, and the images seen in all of them."""
        seen = None if self.images is None else self.images + record["images"]
        config = dataclasses.replace(model.config, runs=(*self.runs, record), trained_images=seen)
        return Model.build(config, model.network)


def start_from(source: str, model: Model) -> Origin:
    """Put an earlier model's weights into a new one of the same architecture; returns where it then comes from."""
    earlier = load(source)
    difference = _difference(earlier, model)
    if difference:
        raise UsageError(
            f"the model {source} cannot be started from: {difference}; give the recipe it was trained with, or leave "
            "--init out"
        )
    tensors = earlier.network.state_dict()
    load_weights(model.network, tensors, f"the model {source}", than="this recipe's")
    known = earlier.config.runs
    return Origin(
        runs=known or (UNKNOWN,),
        images=earlier.config.trained_images,
        weights=weights_digest(tensors, source)[:SHOWN_DIGITS],
        head=earlier.config.head,
    )


def _difference(earlier: Model, new: Model) -> str | None:
    """The first thing in which two models differ that weights depend on. Noise levels and image sizes may."""
    old, now = earlier.config, new.config
    for name in ("network", "param"):
        if getattr(old, name) != getattr(now, name):
            return f"its {name} is {getattr(old, name)!r}, and the recipe's {getattr(now, name)!r}"
    for key in dict.fromkeys([*now.options, *old.options]):
        if key not in FREE_OPTIONS and old.options.get(key) != now.options.get(key):
            return f"its network.{key} is {old.options.get(key)}, and the recipe's {now.options.get(key)}"
    if old.param == CLASSES and old.classes != now.classes:
        return f"its classes are {', '.join(old.classes)}, and the data's {', '.join(now.classes)}"
    if old.head and old.head["denoiser"] != now.head["denoiser"]:
        return "it is a head for a denoiser of other weights"
    return None
