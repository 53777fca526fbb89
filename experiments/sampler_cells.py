"""Cells of tables of samplers: many images by one sampler, judged against data.

The images of a cell are written as they come, so a cell that was stopped goes on with --resume.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.experiment import Context
from experiments.grid import Cell, Measure
from mmdgs.covariances import as_covariance
from mmdgs.data import ImageSet, image_set, load_images, load_samples
from mmdgs.evaluation import OF_FEATURES, evaluate
from mmdgs.evaluation.checks import OF_ROWS
from mmdgs.identity import digest_of
from mmdgs.metrics import load_inception
from mmdgs.metrics.features import ImageFeatures, image_features
from mmdgs.metrics.frechet import FeatureMoments, frechet_distance, left_out_distances
from mmdgs.metrics.inception_file import Inception
from mmdgs.models import FitData, Model
from mmdgs.sampling import Generated, generate, make_plan
from mmdgs.sampling.named import exploding_levels
from mmdgs.schedules import Levels, geometric
from mmdgs.workspace import PARTS, Part

FID = Measure("fid", "FID", 2, "less")
DIVERSITY = Measure("diversity", "diversity", 3)
DUPLICATES = Measure("duplicates", "duplicates", 1, percent=True)
EVALUATIONS = Measure("evaluations", "evaluations", 0)
MILLISECONDS = Measure("milliseconds", "ms an image", 1)
COST = "A product with the Jacobian counts as two evaluations of the network."
DIGEST = 12  # characters of a digest in a file's name


@dataclass(frozen=True)
class SamplingSettings:
    """How many images of how many seeds together, in which precision, and what is measured."""

    images: int = 5_000
    seeds: int = 1
    fit_images: int = 2_000  # from which variances and spectra are estimated
    batch_size: int | None = None  # chains at a time; None: as many as suit the device
    precision: str = "bf16"
    metrics: tuple[str, ...] = ("fid", "diversity")
    reference_limit: int | None = None
    shown: int = 10

    @property
    def measure(self) -> Measure:
        """The number that samplers are compared by."""
        return FID if "fid" in self.metrics else DIVERSITY


@dataclass(frozen=True)
class References:
    """A set of images by name or path, as a model has them; `limit` keeps the first so many."""

    name: str
    data_dir: str | None = None
    size: int | None = None
    limit: int | None = None

    def load(self, split: str = "train") -> ImageSet:
        """The images, read for the first cell that needs them and kept for the others."""
        return _images(self, split)

    def fit_data(self, images: int) -> FitData:
        """Some of the images, for fitted variances."""
        return FitData(self.name, images, None if self.data_dir is None else Path(self.data_dir))


@lru_cache(maxsize=4)
def _images(of: References, split: str) -> ImageSet:
    return load_images(of.name, split, data_dir=of.data_dir, size=of.size, limit=of.limit)


@lru_cache(maxsize=2)
def _features(
    of: References, inception: Inception, keep: bool, device: torch.device
) -> ImageFeatures:
    """Half a gigabyte for a set of the usual size, and the root of its covariance."""
    return image_features(of.load(), inception, keep=keep, cache=True, device=device)


@dataclass(frozen=True, eq=False)
class Judge:
    """What is measured of samples (names of `evaluation`), against which images, and by what."""

    metrics: tuple[str, ...]
    references: References
    device: torch.device
    inception: Inception | None = None
    classifier: Model | None = None

    @classmethod
    def of(
        cls, context: Context, metrics: Sequence[str], of: References, classifier: Any = None
    ) -> Judge:
        """The judge of these metrics; classes are counted where there is a classifier."""
        inception = load_inception() if any(name in OF_FEATURES for name in metrics) else None
        counted = (*metrics, "classes") if classifier is not None else tuple(metrics)
        return cls(counted, of, context.device, inception, classifier)

    def to_json(self) -> dict[str, Any]:
        """What its numbers depend on."""
        known: dict[str, Any] = {"metrics": list(self.metrics), "limit": self.references.limit}
        if self.inception is not None:
            known["inception"] = self.inception.sha256[:DIGEST]
        if self.classifier is not None:
            known["classifier"] = self.classifier.digest[:DIGEST]
        return known

    def __call__(self, x: Tensor, label: str, groups: int = 1) -> dict[str, Any]:
        """The numbers of images uint8 (n, C, H, W), and why some could not be had (`open`).

        With several groups, FIDs with each of them left out come along.
        """
        features = None
        if self.inception is not None:
            rows = any(name in OF_ROWS for name in self.metrics)
            features = _features(self.references, self.inception, rows, self.device)
        judged = evaluate(
            image_set(x, label), self.references.load(), metrics=self.metrics, groups=groups,
            inception=self.inception, classifier=self.classifier, reference_features=features,
            device=self.device, progress=None,
        )  # fmt: skip
        left_out = {f"{name}_left_out": values for name, values in judged.left_out.items()}
        return {**numbers(judged.values), **left_out, "open": judged.open}

    def fid_of(self, groups: Sequence[Tensor]) -> dict[str, Any]:
        """The FID of images by the features (n, d) of their groups, and with each left out."""
        assert self.inception is not None
        features = _features(self.references, self.inception, False, self.device)
        theirs = features.moments.to(self.device)
        parts = [FeatureMoments.of(group.to(self.device)) for group in groups]
        whole = frechet_distance(reduce(FeatureMoments.__add__, parts), theirs)
        return {"fid": whole, "fid_left_out": left_out_distances(parts, theirs)}


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an evaluation under one name each."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        if name == "fid":
            named["fid"] = float(value)
        elif name == "precision-recall":
            named |= {"precision": value["precision"], "recall": value["recall"]}
        elif name == "diversity":
            named |= {"diversity": value["ratio"], "duplicates": value["samples"]["duplicates"]}
        elif name == "classes":
            named |= {"class_shares": value["samples"], "class_names": value["names"]}
            named |= {"class_entropy": value["entropy"], "class_distance": value["distance"]}
            named |= {"data_shares": value["reference"], "data_entropy": value["reference_entropy"]}
        else:
            named |= {name: value["mean"], f"{name}_std": value["std"]}
    return named


@dataclass(frozen=True, eq=False)
class Sampling:
    """Measures cells whose `what` is a SamplerSettings: samples of one model, judged.

    A method names its head and guide by digests; the head is the context's, the guide the model's.
    """

    context: Context
    model: Model
    judge: Judge
    settings: SamplingSettings

    @property
    def depends(self) -> dict[str, Any]:
        """What every cell depends on."""
        known = self.settings
        return {
            "model": self.model, "judge": self.judge, "images": known.images // known.seeds,
            "fit_images": known.fit_images, "precision": known.precision,
        }  # fmt: skip

    def __call__(self, cell: Cell) -> Part:
        """The cost of a cell and the numbers of its images, with the first of them as `shown`."""
        x, cost = self.images(cell)
        values = self.judge(x, cell.name, len(cell.seeds))
        return Part({**values, **cost}, {"shown": x[: self.settings.shown].clone()})

    def images(self, cell: Cell) -> tuple[Tensor, dict[str, Any]]:
        """The images of a cell, uint8, one seed after the other, and their cost.

        Raises TimeIsUp where the minutes are over before the last seed is begun.
        """
        workspace, settings = self.context.workspace, self.settings
        covariance = cell.what.covariance and as_covariance(cell.what.covariance)
        if getattr(covariance, "head", None) is not None:
            covariance = replace(covariance, head=self.context.head)
        fitted = covariance is not None and covariance.fitted
        data = self.judge.references.fit_data(settings.fit_images) if fitted else None
        method = replace(cell.what, covariance=covariance, guide=None)
        plan = make_plan(method, self.model, data=data)
        digest = digest_of(self.depends, cell.what)
        folder, name = workspace.out / PARTS, cell.name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        files = {seed: folder / f"{name}-{digest}-{seed}.npz" for seed in cell.seeds}
        runs: list[Generated] = []
        for seed, file in files.items():
            if runs:
                self.context.check_time()
            runs.append(generate(
                self.model, plan, settings.images // settings.seeds, out=file, seed=seed,
                batch_size=settings.batch_size, precision=settings.precision,
                fast=not self.context.quick, resume=workspace.resumed,
                overwrite=not workspace.resumed, progress=cell.name,
            ))  # fmt: skip
        x = torch.cat([load_samples(file).images for file in files.values()])
        for file in files.values():  # tens of megabytes: the numbers and the first images are kept
            file.unlink()
            file.with_suffix(".samples.json").unlink()
        seconds, cost = sum(run.seconds for run in runs), runs[0].cost
        return x, {
            "images": len(x), "seconds": seconds, "milliseconds": 1_000 * seconds / len(x),
            "repaired": statistics.mean(run.repaired for run in runs),
            "forwards": cost.forwards, "products": cost.products, "evaluations": cost.evaluations,
        }  # fmt: skip


def path(model: Model, count: int) -> Levels:
    """Geometric levels between the ends of the model's variance-exploding ones."""
    ends = exploding_levels(model)
    return geometric(count, ends[0].sigma, ends[-1].sigma)
