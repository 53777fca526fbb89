"""Cells of a table of samplers: many images by one sampler, judged against data.

A cell is a part of the workspace. Its images are written as they come, so a cell that was stopped goes on, too.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data import ImageSet, image_set, load_images, to_uint8
from mmdgs.evaluation import OF_FEATURES, evaluate
from mmdgs.evaluation.checks import OF_ROWS
from mmdgs.generation import Generated, Method, generate, make_plan
from mmdgs.lab.experiment import Context
from mmdgs.lab.workspace import PARTS, Part
from mmdgs.metrics import load_inception
from mmdgs.metrics.features import ImageFeatures, cached_features
from mmdgs.metrics.inception_file import Inception
from mmdgs.models import FitData, Model, load, weights_digest

DIGEST = 12
"""Characters of a digest in a file's name."""


class TimeIsUp(Exception):  # noqa: N818 - no error: a run ends as it was told to
    """The minutes of a run were over between two seeds of a cell; those that are done are kept for --resume."""


@dataclass(frozen=True)
class References:
    """A set of images by name or path, as a model has them; `limit` keeps the first so many."""

    name: str
    data_dir: str | None = None
    size: int | None = None
    limit: int | None = None

    def load(self, split: str = "train") -> ImageSet:
        return _images(self, split)


@lru_cache(maxsize=4)
def _images(wanted: References, split: str) -> ImageSet:
    """Read for the first cell that needs them, and kept for the others."""
    return load_images(wanted.name, split, data_dir=wanted.data_dir, size=wanted.size, limit=wanted.limit)


@lru_cache(maxsize=2)
def _features(wanted: References, inception: Inception, keep: bool, device: torch.device) -> ImageFeatures:
    """Half a gigabyte for a set of the usual size, and the root of its covariance with it, which takes a while."""
    return cached_features(wanted.load(), inception, keep=keep, device=device)


@dataclass(frozen=True, eq=False)
class Judge:
    """What is measured of samples (names of `evaluation`), against which images, by which networks."""

    metrics: tuple[str, ...]
    references: References
    device: torch.device
    inception: Inception | None = None
    classifier: Model | None = None

    @classmethod
    def of(
        cls,
        context: Context,
        metrics: Sequence[str],
        references: References,
        classifier: Model | None = None,
    ) -> Judge:
        """The judge of these metrics; the classes are counted where there is a classifier."""
        inception = load_inception() if any(name in OF_FEATURES for name in metrics) else None
        counted = (*metrics, "classes") if classifier is not None else tuple(metrics)
        return cls(counted, references, context.device, inception, classifier)

    def key(self) -> dict[str, Any]:
        """What its numbers depend on, for the settings of a part."""
        found: dict[str, Any] = {"metrics": list(self.metrics), "limit": self.references.limit}
        if self.inception is not None:
            found["inception"] = self.inception.sha256[:DIGEST]
        if self.classifier is not None:
            found["classifier"] = weights_digest(self.classifier.network.state_dict(), "the classifier")[:DIGEST]
        return found

    def __call__(self, x: Tensor, label: str, groups: int = 1) -> dict[str, Any]:
        """The numbers of images uint8 (n, C, H, W), flat, and the reasons of those that stay open.

        With several groups, FIDs with each of them left out come along.
        """
        found = evaluate(
            image_set(x, label), self.references.load(), metrics=self.metrics, inception=self.inception,
            classifier=self.classifier, groups=groups, reference_features=self._reference_features(),
            device=self.device, progress=None,
        )  # fmt: skip
        left_out = {f"{name}_left_out": values for name, values in found.left_out.items()}
        return {**numbers(found.values), **left_out, "open": found.open}

    def _reference_features(self) -> ImageFeatures | None:
        if self.inception is None:
            return None
        return _features(self.references, self.inception, any(name in OF_ROWS for name in self.metrics), self.device)


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an evaluation under one name each."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "fid":
            found["fid"] = float(value)
        elif name == "precision-recall":
            found |= {"precision": value["precision"], "recall": value["recall"]}
        elif name == "diversity":
            found |= {"diversity": value["ratio"], "duplicates": value["samples"]["duplicates"]}
        elif name == "classes":
            found |= {"class_shares": value["samples"], "class_names": value["names"]}
            found |= {"class_entropy": value["entropy"], "class_distance": value["distance"]}
            found |= {"data_shares": value["reference"], "data_entropy": value["reference_entropy"]}
        else:
            found |= {name: value["mean"], f"{name}_std": value["std"]}
    return found


@dataclass(frozen=True, eq=False)
class Cells:
    """What all cells of a table share: the model, how many images in which precision, data for fitted variances."""

    context: Context
    model: Model
    data: str
    fit_images: int
    batch_size: int
    precision: str
    shown: int

    def asked(self, method: Method, images: int, seeds: Sequence[int]) -> dict[str, Any]:
        """What the images of a cell depend on; a head by its weights, wherever it is kept."""
        named = method.to_json()
        if method.head is not None:
            named["head"] = load(method.head).digest
        return {
            "model": self.model.digest, "method": named, "images": images, "seeds": list(seeds),
            "fit_images": self.fit_images, "precision": self.precision,
        }  # fmt: skip

    def has(self, name: str, method: Method, images: int, seeds: Sequence[int], judge_key: Mapping[str, Any]) -> bool:
        """Whether a cell is finished."""
        return self.context.workspace.has(file_name(name), {**self.asked(method, images, seeds), **judge_key})

    def sampled(
        self,
        name: str,
        method: Method,
        images: int,
        seeds: Sequence[int],
        judged: Callable[[Tensor, str], dict[str, Any]],
        judge_key: Mapping[str, Any],
    ) -> Part:
        """A cell: its cost and what `judged` says of its images, with the first of them as `shown`.

        Each seed has so many images, which come one seed after the other. Raises TimeIsUp where the context's minutes
        are over before the last of them is begun.
        """
        asked = {**self.asked(method, images, seeds), **judge_key}

        def compute() -> Part:
            x, values = self._images(name, method, images, seeds, asked)
            return Part({**judged(x, name), **values}, {"shown": x[: self.shown].clone()})

        return self.context.workspace.part(file_name(name), asked, compute)

    def _images(
        self, name: str, method: Method, images: int, seeds: Sequence[int], asked: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        workspace = self.context.workspace
        files = None if self.context.data_dir is None else Path(self.context.data_dir)
        fit = FitData(self.data, self.fit_images, files)
        plan = make_plan(method, self.model, data=fit)
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:DIGEST]
        folder = workspace.out / PARTS
        folder.mkdir(exist_ok=True)
        stored = [folder / f"{file_name(name)}-{digest}-{seed}.npz" for seed in seeds]
        made: list[Generated] = []
        for file, seed in zip(stored, seeds, strict=True):
            if made and self.context.time_is_up:
                raise TimeIsUp
            seeds_own = generate(
                self.model, plan, images, out=file, seed=seed, batch_size=self.batch_size, precision=self.precision,
                fast=not self.context.quick, resume=workspace.resumed, overwrite=not workspace.resumed, progress=name,
            )  # fmt: skip
            made.append(seeds_own)
        x = torch.cat([to_uint8(torch.from_numpy(_pixels(file)).clamp(0, 1)) for file in stored])
        for file in stored:
            for one in (file, file.with_suffix(".samples.json")):
                one.unlink()  # hundreds of megabytes that the numbers and the first images stand for
        cost = made[0].cost
        return x, {
            "images": len(x), "seconds": sum(one.seconds for one in made),
            "repaired": statistics.mean(one.repaired for one in made),
            "forwards": cost.forwards, "products": cost.products, "evaluations": cost.evaluations,
        }  # fmt: skip


def _pixels(file: Path) -> numpy.ndarray:
    with numpy.load(file) as stored:
        return stored["x"]


def file_name(name: str) -> str:
    """A cell's name as that of a file."""
    return name.replace(" ", "_")
