"""Models as denoisers and as files: a network with its configuration.

A model's folder is in the Hugging Face hub's format: `config.json` (everything needed to build it),
`model.safetensors` (its weights, or several files of them: `models/weights.py`) and `README.md` (its card). Nothing in
it is executed on loading.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmdgs.denoisers import Denoiser, Network
from mmdgs.errors import UsageError
from mmdgs.files import read_json, to_json, write_atomically
from mmdgs.models.card import model_card
from mmdgs.models.config import DENOISERS, MEAN_STD, VARIANCE_RATIO, ModelConfig
from mmdgs.models.weights import INDEX, SHARDS, WEIGHTS, load_weights, read_weights, write_weights
from mmdgs.moments import DiagonalMoments, IsotropicMoments, LearnedMoments, Moments
from mmdgs.moments.ocm import RatioHead
from mmdgs.networks.registry import build_network
from mmdgs.noise import NoiseLevel

CONFIG, CARD = "config.json", "README.md"
HUB_FILES = (CONFIG, CARD, WEIGHTS, INDEX, SHARDS)
"""The files of a model in a repository of the hub, as patterns."""


class Model:
    """A network with its configuration: the denoiser, the noise level, the posterior.

    `model.denoiser` goes into any moments estimator and `model.posterior()` is the estimator one wants first;
    both at `model.level`.
    """

    def __init__(self, config: ModelConfig, network: nn.Module | None = None, *, seed: int = 0) -> None:
        self.config = config
        self.card: str | None = None  # README.md, where the model came with one
        if network is None:
            network = build_network(config.network, config.inputs, config.outputs, config.options, seed=seed)
        self.network = network

    @property
    def level(self) -> NoiseLevel:
        """The noise level the model was trained at."""
        if len(self.levels) != 1:
            said = f"{len(self.levels)} noise levels: use model.levels" if self.levels else "no noise level"
            raise UsageError(f"this model has {said}")
        return self.levels[0]

    @property
    def levels(self) -> tuple[NoiseLevel, ...]:
        """The noise levels the model was trained at, the noisiest first."""
        return self.config.levels

    @property
    def denoiser(self) -> Denoiser:
        """E[x | x_t] as a function; a model with mean and std heads has its mean, a classifier none."""
        return self.denoiser_of(self.network)

    def denoiser_of(self, network: Network) -> Denoiser:
        """The denoiser of another network in place of this model's (compiled, say), with the same meaning."""
        if self.config.param not in DENOISERS:
            raise UsageError(
                f"a model with parametrisation {self.config.param!r} is no denoiser; "
                "use model.posterior() for one with mean and std heads, mmdgs.load_head for one of variance ratios"
            )
        return DENOISERS[self.config.param](network)

    def head_of(self, network: Network) -> RatioHead:
        """A network (this model's, or the same compiled) as a head for OcmMoments."""
        if self.config.param != VARIANCE_RATIO:
            raise UsageError(f"a model with parametrisation {self.config.param!r} is no head of variance ratios")
        return RatioHead(network, self.config.ratio_scale)

    def posterior(self, *, probes: int | None = 10) -> Moments:
        """The estimator of p(x | x_t) to begin with: the learned heads, or the diagonal of the Jacobian by probes."""
        if self.config.param == MEAN_STD:
            return LearnedMoments(self.network)
        return DiagonalMoments(self.denoiser, probes=probes)

    def isotropic_posterior(self) -> IsotropicMoments:
        """The posterior with one variance for all pixels, which was fitted after training."""
        if self.config.isotropic_variance is None:
            raise UsageError("this model holds no isotropic variance; use IsotropicMoments.fit with data")
        return IsotropicMoments(self.denoiser, {self.level: self.config.isotropic_variance})

    def to(self, device: torch.device | str) -> Model:
        """Move the network; returns the model."""
        self.network.to(device)
        return self

    def describe(self, training: Mapping[str, Any] | None = None) -> str:
        """A card for this model; `training` holds the command it was trained with, and its numbers."""
        return model_card(self.config, sum(p.numel() for p in self.network.parameters()), training)

    def save_pretrained(
        self,
        folder: Path | str,
        *,
        card: str | None = None,
        dtype: torch.dtype | None = None,
        shard_mb: float | None = None,
    ) -> Path:
        """Write the folder of this model (hub format). Each file whole or not at all.

        Weights are in `dtype` if given, and where they are larger than `shard_mb` million bytes in several files.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder, self.network.state_dict(), dtype=dtype, shard_mb=shard_mb)
        write_atomically(folder / CONFIG, to_json(self.config.to_json()))
        card = card or self.card
        if card is not None or not (folder / CARD).exists():
            write_atomically(folder / CARD, (card or self.describe()).encode())
        return folder

    @classmethod
    def from_pretrained(cls, source: Path | str, *, revision: str | None = None, token: str | None = None) -> Model:
        """A model from its folder, or from a repository of the Hugging Face hub ("owner/name")."""
        folder = Path(source)
        if not folder.is_dir():
            folder = from_hub(str(source), HUB_FILES, revision=revision, token=token)
        if not (folder / CONFIG).is_file():
            raise UsageError(f"{folder} holds no model: there is no {CONFIG} in it")
        model = cls(ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG))
        load_weights(model.network, *read_weights(folder))
        model.network.requires_grad_(False).eval()
        if (folder / CARD).is_file():
            model.card = (folder / CARD).read_text(encoding="utf-8")
        return model

    def push_to_hub(self, repository: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload to the Hugging Face hub as "owner/name"; returns the address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="mmdgs model")
        return str(address)


def from_hub(name: str, files: Sequence[str], *, revision: str | None = None, token: str | None = None) -> Path:
    """Fetch the files of a repository of the Hugging Face hub that match some patterns; the folder they are in."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(f"there is no model folder {name!r} here")
    try:
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=list(files))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{name!r} is neither a model folder here nor could it be fetched from the Hugging Face hub ({reason})"
        ) from error
    return Path(found)


def load(source: Path | str, *, device: torch.device | str = "cpu") -> Model:
    """A model from a training run's folder, a model's folder, the hub ("owner/name"), or one that ships ("mnist")."""
    return Model.from_pretrained(shipped(str(source)) or source).to(device)


def save(model: Model, folder: Path | str, *, card: str | None = None) -> Path:
    """Write a model's folder: config.json, model.safetensors, README.md."""
    return model.save_pretrained(folder, card=card)


SHIPPED = {
    "mnist": "mnist-energy",
    "mnist-energy": "mnist-energy",
    "mnist-kl": "mnist-kl",
    "mnist-classifier": "mnist-classifier",
    "cifar10": "cifar10",
    "cifar10-classifier": "cifar10-classifier",
    "cifar10-score": "cifar10-score",
    "celeba": "celeba",
}
"""Names of models that may come with mmdgs, and their folders under weights/."""
RECIPES = {"cifar10": "cifar10.yaml", "cifar10-score": "cifar10-score.yaml", "celeba": "celeba.yaml"}
"""What trains those that may be absent, in recipes/ of the source tree."""


def shipped(name: str) -> Path | None:
    """The folder of a model that comes with the package (inside it, or beside `src` in a source tree)."""
    if name not in SHIPPED or Path(name).is_dir():
        return None
    here = Path(__file__).resolve().parents[1]
    for root in (here / "weights", here.parents[1] / "weights"):
        if (root / SHIPPED[name] / CONFIG).is_file():
            return root / SHIPPED[name]
    said = f"the weights of {name!r} did not come with this installation"
    if name not in RECIPES:
        raise UsageError(f"{said}; look for them in the source tree")
    raise UsageError(
        f"{said}, or are not trained yet; look for weights/{SHIPPED[name]} in the source tree, or train them on a GPU: "
        f"mmdgs train --config recipes/{RECIPES[name]} --out runs/{name}, and then give that folder"
    )
