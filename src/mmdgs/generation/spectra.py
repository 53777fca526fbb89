"""The spectrum of a denoiser's errors over noise levels: estimated once from data, and kept.

A spectrum is fitted at some levels between the ends of a model's range and serves at all others (spectral.py). It is
kept in the cache folder (MMDGS_CACHE, else ~/.cache/mmdgs); one that comes with a model is spectral.safetensors in its
folder. It belongs to the weights, the data, the number of images and the seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from mmdgs.data.sources import cache_folder
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.generation.variances import FitData, isotropic_moments
from mmdgs.models import shipped
from mmdgs.moments import Moments
from mmdgs.moments.spectral import SpectralMoments, fitted_spectrum
from mmdgs.noise import NoiseLevel
from mmdgs.pretrained import Pretrained
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar
from mmdgs.schedules import Levels, geometric

logger = logging.getLogger("mmdgs")

FILE = "spectral.safetensors"
KNOTS = 32
"""Levels at which a spectrum is fitted: from 50 to 0.01 the noise falls by a quarter from one to the next."""
DIGEST = 32


def fitted_moments(covariance: str, pretrained: Pretrained, levels: Levels, data: FitData | None = None) -> Moments:
    """The estimator of a covariance that is fitted on data: "isotropic" or "spectral"."""
    if covariance == "spectral":
        return spectral_moments(pretrained, data)
    return isotropic_moments(pretrained, levels, data)


def spectral_moments(
    pretrained: Pretrained, data: FitData | None = None, *, progress: str | None = "spectra of errors"
) -> SpectralMoments:
    """The estimator with one variance a frequency: one that is kept, or from data.

    Without `data` whatever is kept for these weights will do, that of the most images first.
    """
    kept = list(_kept(pretrained))
    if data is None:
        if not kept:
            raise UsageError(
                f"no spectrum is kept for {pretrained.source}: give the data to estimate it from, "
                "such as --data cifar10"
            )
        return max(kept, key=lambda one: one[0]["images"])[1]
    for key, moments in kept:
        if key == data.key:
            return moments
    ratios, logs = _fit(pretrained, data, progress)
    _keep(pretrained, data, ratios, logs)
    return SpectralMoments(pretrained, ratios, logs.double().exp())


def _fit(pretrained: Pretrained, data: FitData, progress: str | None) -> tuple[Tensor, Tensor]:
    """Ratios and logarithms, as they are kept, at KNOTS levels of the model's range, or at its one level."""
    ends = [level.sigma / level.alpha for level in (pretrained.levels[0], pretrained.levels[-1])]
    levels: list[NoiseLevel] = [*geometric(KNOTS, *ends)] if ends[0] > ends[1] else [pretrained.levels[0]]
    x = data.load(pretrained).to(next(pretrained.network.parameters()).device)
    found = []
    with progress_bar(len(levels), progress, unit="level") as bar:
        for level in reversed(levels):  # with the same noise at every level
            found.append(fitted_spectrum(pretrained, x, level, generator=Streams(data.seed, len(x))))
            bar.update()
    ratios = torch.tensor([level.sigma / level.alpha for level in reversed(levels)], dtype=torch.float64)
    return ratios, torch.stack(found).log().float()


def spectrum_files(pretrained: Pretrained) -> list[Path]:
    """Where spectra are: with the model, in its own folder or that of one that ships, and in the cache folder."""
    folder: Path | None = None
    with contextlib.suppress(UsageError):  # of a name whose weights did not come along
        folder = shipped(pretrained.source) or Path(pretrained.source).expanduser()
    with_model = [folder / FILE] if pretrained.source and folder and (folder / FILE).is_file() else []
    return [*with_model, *sorted(_cache().glob(f"{pretrained.digest[:DIGEST]}-*.safetensors"))]


def _cache() -> Path:
    return cache_folder() / "spectral"


def _kept(pretrained: Pretrained) -> Iterator[tuple[dict[str, Any], SpectralMoments]]:
    """All spectra that are kept for these weights, each after what it was estimated from.

    A damaged file is as good as none, and the log says so.
    """
    for file in spectrum_files(pretrained):
        try:
            with safetensors.safe_open(file, "pt") as stored:
                notes = stored.metadata() or {}
                if notes.get("digest") != pretrained.digest:
                    continue
                key = json.loads(notes["key"])
                ratios, logs = (stored.get_tensor(name).double() for name in ("ratios", "log_variances"))
            if not isinstance(key["images"], int) or logs.shape[1:] != pretrained.shape:
                raise ValueError("it says not what it was estimated from, or is of another shape")
            moments = SpectralMoments(pretrained, ratios, logs.exp())  # refuses what is no spectrum
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
            logger.warning("the spectrum in %s cannot be read (%s); it is left aside", file, error)
            continue
        yield key, moments


def _keep(pretrained: Pretrained, data: FitData, ratios: Tensor, logs: Tensor) -> None:
    """Write a spectrum into the cache folder."""
    name = hashlib.sha256(json.dumps(data.key, sort_keys=True).encode()).hexdigest()[:DIGEST]
    file = _cache() / f"{pretrained.digest[:DIGEST]}-{name}.safetensors"
    notes = {"digest": pretrained.digest, "key": json.dumps(data.key)}
    content = save({"ratios": ratios, "log_variances": logs}, notes)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        logger.warning("the spectrum could not be kept (%s); set MMDGS_CACHE to a folder that can be written", error)
