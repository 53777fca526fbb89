"""The model: a denoiser with its noise levels, its data's shape and interval, and its posteriors.

A model of mmdgs has a configuration, and its folder is in the Hugging Face hub's format
(`models/weights.py`); nothing in it is executed on loading. A network from elsewhere has no
configuration (`models/loading.py`).
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure
from mmdgs.covariances import FITTED, Covariance, Estimated, as_covariance
from mmdgs.denoisers import Denoiser, HasPure, Network, NetworkDenoiser, require_denoiser
from mmdgs.errors import UsageError
from mmdgs.files import files_written_together, new_folder, to_json, write_atomically
from mmdgs.models.card import model_card
from mmdgs.models.config import (
    COVARIANCE,
    DENOISERS,
    MEAN_STD,
    MOST_SHAPE,
    VARIANCE_RATIO,
    ModelConfig,
    shape_in_words,
)
from mmdgs.models.estimators import estimator_name, kept_calibration, make_moments, own_covariance
from mmdgs.models.fits import FitData
from mmdgs.models.levels import AtAnyLevel, TrainedLevels, in_words
from mmdgs.models.weights import CARD, CONFIG, remove_weights, weights_digest, write_weights
from mmdgs.moments import Moments, require_input
from mmdgs.moments.checks import networks_of
from mmdgs.moments.heads import LearnedMean, SpectralHead
from mmdgs.moments.ocm import RatioHead
from mmdgs.networks.registry import build_network
from mmdgs.noise import AnyLevel, LevelTable, NoiseLevel


class Model:
    """A denoiser D(x_t, level) = E[x | x_t], with the levels and data its network was trained on.

    `levels` are as trained, the noisiest first; others are answered too, by their ratio sigma /
    alpha, unless there is one level only. `model.posterior()` is the estimator of p(x | x_t) to
    begin with. A classifier and a head of variance ratios are models that are no denoisers: calling
    them raises UsageError.

    Your own network is a model by `Model(mmdgs.noise_denoiser(net), levels=levels, shape=(3, 32,
    32))`, or shape=(3, None, None) where it takes images of any size, (1, None, None, None) of
    volumes; `network` holds its weights,
    and without one the networks that the denoiser calls are looked for.
    """

    def __init__(
        self,
        denoiser: Denoiser | None,
        network: nn.Module | None = None,
        levels: Sequence[NoiseLevel] = (),
        shape: Sequence[int | None] = (),
        interval: tuple[float, float] = (0.0, 1.0),
        source: str = "",
    ) -> None:
        if isinstance(denoiser, NetworkDenoiser | LearnedMean) and levels:
            denoiser = AtAnyLevel(denoiser, TrainedLevels(levels))
        self._denoiser = denoiser
        self.network = nn.ModuleList(networks_of(denoiser)) if network is None else network
        self.levels = tuple(levels)
        self.shape: tuple[Any, ...] = tuple(shape)  # of one example; (3, None, None): any size
        # and so of the views by `sized`
        self.any_size = len(self.shape) > 2 and set(self.shape[1:]) == {None}
        self.interval = interval  # where the data's values lie
        self.source = source  # the path or name it came from
        self._config: ModelConfig | None = None  # of a model of mmdgs
        # By the kind of a fit: what a model of other shapes has of that it is made of.
        self.inherited_fit: Callable[[str], LevelTable | None] = lambda kind: None
        self.card: str | None = None  # README.md, where the model came with one
        self.folder: Path | None = None  # where its files are, where they are in one

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        network: nn.Module | None = None,
        *,
        seed: int = 0,
        source: str = "",
    ) -> Model:
        """A model of mmdgs by its configuration; without a network, one drawn from the seed."""
        if network is None:
            network = build_network(
                config.network, config.inputs, config.outputs, config.options, seed=seed
            )
        of = f" of {config.trained_on}" if config.trained_on else ""
        source = source or f"a {config.network} model{of}"
        denoiser = _by_param(config.param, network)
        model = cls(denoiser, network, config.levels, config.shape, config.interval, source)
        model._config = config
        return model

    def __repr__(self) -> str:
        what = self.param or type(self._denoiser).__name__
        classes = 0 if self._config is None else len(self._config.classes)
        answers = f"{classes} classes" if classes else in_words(self.levels)
        size = sum(weights.numel() for weights in self.network.parameters()) / 1e6
        shape = shape_in_words(self.shape)
        return f"Model({self.source!r}, {what}, {shape}, {answers}, {size:.2f} million parameters)"

    # --- the denoiser

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        require_input(x_t, level, self)
        return self.require_denoiser()(x_t, level)

    def pure(self, level: AnyLevel) -> Pure | None:
        """For the fast path."""
        return self._denoiser.pure(level) if isinstance(self._denoiser, HasPure) else None

    def mean_and_jacobian(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor] | None:
        """In closed form, where the denoiser has one."""
        known = getattr(self._denoiser, "mean_and_jacobian", None)
        return None if known is None else known(x_t, level)

    @property
    def symmetric_jacobian(self) -> bool:
        """Whether the denoiser's Jacobian is symmetric, as an energy's is."""
        return bool(getattr(self._denoiser, "symmetric_jacobian", False))

    @property
    def subtracts(self) -> bool:
        """Whether the denoiser takes the noise off x_t (`denoisers.subtracts_noise`)."""
        return bool(getattr(self._denoiser, "subtracts", False))

    def require_denoiser(self) -> Denoiser:
        """The denoiser itself; UsageError for a classifier or a head of variances."""
        if self._denoiser is None:
            raise UsageError(
                f"a model with parametrisation {self.param!r} is no denoiser; use model.network "
                "for a classifier, mmdgs.models.load_head for a head"
            )
        return self._denoiser

    def denoiser_of(self, network: Network) -> Denoiser:
        """The denoiser of a network in place of this model's (compiled, say), of the same meaning.

        It takes the model's own levels, and a level for each row, as training does.
        """
        return _by_param(self.config.param, network) or self.require_denoiser()

    def head_of(self, network: Network) -> Any:
        """A network (this model's, or the same compiled) as a head of Ocm- or ModulatedMoments."""
        if self.config.param == COVARIANCE:
            return SpectralHead(network, self.config.head["data_std"])
        if self.config.param != VARIANCE_RATIO:
            raise UsageError(f"a model with parametrisation {self.param!r} is no head of variances")
        return RatioHead(network, self.config.ratio_scale)

    def posterior(
        self,
        covariance: Covariance | str | None = None,
        *,
        data: FitData | None = None,
        levels: Sequence[NoiseLevel] | None = None,
    ) -> Moments:
        """The estimator of p(x | x_t) with a covariance of `mmdgs.covariances`, or its name.

        Without one: the learned one of a model with mean and std heads, else the diagonal by three
        probes. A fitted covariance is fitted on `data` (isotropic variances at `levels`), or
        without them taken from what is kept with the model or in the cache. A calibration that is
        kept for the estimator (`mmdgs.calibrate`; models that ship have some) is used, unless the
        covariance is not to be `calibrated` or has a `floor`.
        """
        self.require_denoiser()
        covariance = own_covariance(self) if covariance is None else as_covariance(covariance)
        if not isinstance(covariance, Estimated):
            raise UsageError(f"the covariance {covariance.name!r} is for ancestral sampling alone")
        if data is not None and not covariance.fitted:
            raise UsageError(
                f"the covariance {covariance.name!r} takes no data: only {', '.join(FITTED)} do"
            )
        moments = make_moments(self, covariance, data, levels)
        if covariance.calibrated is False or getattr(covariance, "floor", None) is not None:
            return moments
        return kept_calibration(self, moments, bool(covariance.calibrated))

    # --- what it is

    @property
    def config(self) -> ModelConfig:
        """The configuration of a model of mmdgs; UsageError for a network from elsewhere."""
        if self._config is None:
            raise UsageError(
                f"{self.source} is no model of mmdgs: it has no configuration, and cannot be "
                "trained or saved"
            )
        return self._config

    def trained_on(self, images: str) -> bool:
        """Whether the network was trained on these images: a set and part, such as celeba:test."""
        trained = "" if self._config is None else self._config.trained_on
        return images == (trained if ":" in trained else f"{trained}:train")

    @property
    def param(self) -> str | None:
        """What the output of a network of mmdgs means (`ModelConfig.param`); None for others."""
        return None if self._config is None else self._config.param

    def inflation(self, moments: Moments) -> float:
        """What restoration with an estimator multiplies its fresh noise by
        (`ModelConfig.inflation`).
        """
        known = {} if self._config is None else self._config.inflation
        return known.get(estimator_name(moments, self) or "", 1.0) if known else 1.0

    @property
    def level(self) -> NoiseLevel:
        """The noise level of a model that was trained at one."""
        if len(self.levels) != 1:
            raise UsageError(f"this model has {in_words(self.levels)}: use model.levels")
        return self.levels[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are; a model without weights is on the CPU."""
        weights = next(self.network.parameters(), None)
        return torch.device("cpu") if weights is None else weights.device

    @property
    def digest(self) -> str:
        """SHA-256 of the weights (names, shapes, types, bytes), by which results are known."""
        return weights_digest(self.network.state_dict(), self.source)

    def identity(self) -> tuple[Any, ...]:
        """All that results depend on, for `mmdgs.identity`."""
        return self.digest, self.levels, self.shape, self.interval, self._denoiser

    def scaled(self, x: Tensor) -> Tensor:
        """Values in [0, 1] as they lie in the data's interval."""
        low, high = self.interval
        return x if (low, high) == (0.0, 1.0) else low + (high - low) * x

    def sized(self, *sides: int) -> Model:
        """The model for images of one size: itself, or of a model of any size a view of it.

        The sides are (height, width), of volumes (depth, height, width).
        """
        if not self.any_size or self.shape[1:] == sides:
            return self
        if len(sides) != len(self.shape) - 1:
            raise UsageError(f"{self.source} takes {shape_in_words(self.shape)}, got sides {sides}")
        least = getattr(self.network, "smallest", 1)
        size = f"{' x '.join(map(str, reversed(sides)))} pixels"
        if min(sides) < least:
            raise UsageError(f"an image of {size} is too small: the model takes {least} a side")
        if math.prod(sides) * self.shape[0] > MOST_SHAPE:
            raise UsageError(
                f"an image of {size} has more than {MOST_SHAPE:,} numbers: make it smaller"
            )
        model = copy.copy(self)
        model.shape = (self.shape[0], *sides)
        return model

    def grey(self) -> Model:
        """A model of grey images, (1, H, W), by one of colours."""
        from mmdgs.models.shapes import grey_model  # which imports this module

        return self if self.shape[0] != 3 else grey_model(self)

    def beside(self, name: str) -> Path | None:
        """A folder of this name inside the model's own, if there is one: its heads, its guide."""
        folder = self.folder and self.folder / name
        return folder if folder and folder.is_dir() else None

    def to(self, device: torch.device | str) -> Model:
        """Move the network; returns the model."""
        self.network.to(device)
        return self

    # --- its files

    def describe(self, training: Mapping[str, Any] | None = None) -> str:
        """A card for this model; `training` holds its command and its numbers."""
        return model_card(self.config, sum(p.numel() for p in self.network.parameters()), training)

    def save_pretrained(
        self,
        folder: Path | str,
        *,
        card: str | None = None,
        dtype: torch.dtype | None = None,
        shard_mb: float | None = None,
    ) -> Path:
        """Write the folder of this model whole or not at all; other files of the folder stay.

        Weights are in `dtype` if given, and where they are larger than `shard_mb` million bytes in
        several files. A card that is there stays, unless another is given or came with the model.
        """
        config = self.config
        folder = Path(folder)
        card = card or self.card
        with new_folder(folder.parent), files_written_together(folder, last=CONFIG) as temporary:
            weights = write_weights(
                temporary, self.network.state_dict(), dtype=dtype, shard_mb=shard_mb
            )
            write_atomically(temporary / CONFIG, to_json(config.to_json()))
            if card is not None or not (folder / CARD).exists():
                write_atomically(temporary / CARD, (card or self.describe()).encode())
        remove_weights(folder, keep={path.name for path in weights})
        return folder

    def push_to_hub(
        self, repository: str, *, private: bool = False, token: str | None = None
    ) -> str:
        """Upload to the Hugging Face hub as "owner/name"; returns the address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="mmdgs model")
        return str(address)


def _by_param(param: str, network: Network) -> Denoiser | None:
    """A network as a denoiser by what its output means; None for a classifier or a head."""
    if param == MEAN_STD:
        return LearnedMean(network)
    return DENOISERS[param](network) if param in DENOISERS else None


def as_model(
    source: Model | Denoiser,
    *,
    levels: Sequence[NoiseLevel] | None = None,
    shape: Sequence[int] | None = None,
    interval: tuple[float, float] | None = None,
) -> Model:
    """A model as it is; of a denoiser, its levels and its data's shape and interval, the model."""
    if isinstance(source, Model):
        for name, value in (("shape", shape), ("interval", interval)):
            if value is not None:
                raise UsageError(f"{name} is for a denoiser that is no Model, got {source!r}")
        return source
    require_denoiser(source)
    if shape is None:
        raise UsageError(
            "a denoiser that is no Model needs the shape of one example, such as shape=(3, 32, 32)"
        )
    return Model(source, None, levels or (), shape, interval or (0.0, 1.0), type(source).__name__)


def save(model: Model, folder: Path | str, *, card: str | None = None) -> Path:
    """Write a model's folder: config.json, model.safetensors, README.md."""
    return model.save_pretrained(folder, card=card)
