"""Models as denoisers and as files: a network with its configuration.

A model's folder is in the Hugging Face hub's format: `config.json` (everything needed to build it),
`model.safetensors` (its weights) and `README.md` (its card). Nothing in it is executed on loading.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, Network
from mmdgs.errors import UsageError
from mmdgs.files import read_json, read_tensors, tensors_to_bytes, to_json, write_atomically
from mmdgs.models.card import model_card
from mmdgs.models.config import DENOISERS, MEAN_STD, VARIANCE_RATIO, ModelConfig
from mmdgs.moments import DiagonalMoments, IsotropicMoments, LearnedMoments, Moments
from mmdgs.networks.registry import build_network
from mmdgs.noise import NoiseLevel
from mmdgs.ocm import RatioHead

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


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

    def save_pretrained(self, folder: Path | str, *, card: str | None = None, dtype: torch.dtype | None = None) -> Path:
        """Write the folder of this model (hub format), weights in `dtype` if given. Each file whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, tensors_to_bytes(self.network.state_dict(), dtype))
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
            folder = from_hub(str(source), [CONFIG, WEIGHTS, CARD], revision=revision, token=token)
        if not (folder / CONFIG).is_file():
            raise UsageError(f"{folder} holds no model: there is no {CONFIG} in it")
        model = cls(ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG))
        load_weights(model.network, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
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


def load_weights(
    network: nn.Module, tensors: Mapping[str, Tensor], where: object, *, than: str = "its configuration says"
) -> None:
    """Copy tensors into a network, refusing those of another architecture or with values that are not finite."""
    wanted = network.state_dict()
    missing, foreign = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{key} is {tuple(tensors[key].shape)}, expected {tuple(wanted[key].shape)}"
        for key in wanted
        if key in tensors and tensors[key].shape != wanted[key].shape
    ]
    if missing or foreign or shapes:
        said = [f"{len(missing)} missing (such as {missing[0]})"] if missing else []
        said += [f"{len(foreign)} unknown (such as {foreign[0]})"] if foreign else []
        said += [f"{len(shapes)} of another shape ({shapes[0]})"] if shapes else []
        raise UsageError(f"{where} is from another architecture than {than}: tensors {', '.join(said)}")
    check_finite(tensors, where)
    network.load_state_dict(dict(tensors))


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Refuse weights that are NaN or infinite."""
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise UsageError(f"{where} holds values that are not finite, in {bad[0]}")


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
}
"""Names of the models that come with mmdgs, and their folders under weights/."""


def shipped(name: str) -> Path | None:
    """The folder of a model that comes with the package (inside it, or beside `src` in a source tree)."""
    if name not in SHIPPED or Path(name).is_dir():
        return None
    here = Path(__file__).resolve().parents[1]
    for root in (here / "weights", here.parents[1] / "weights"):
        if (root / SHIPPED[name] / CONFIG).is_file():
            return root / SHIPPED[name]
    raise UsageError(f"the weights of {name!r} did not come with this installation; look for them in the source tree")
