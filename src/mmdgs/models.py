"""Models as files and as denoisers: a network, what its output means, and the noise level it was trained at.

A model's folder is in the Hugging Face hub's format: `config.json` (everything needed to build it),
`model.safetensors` (its weights) and `README.md` (its card). Nothing in it is executed on loading.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import (
    Denoiser,
    Network,
    clean_denoiser,
    energy_denoiser,
    noise_denoiser,
    score_denoiser,
    takes_level,
    velocity_denoiser,
)
from mmdgs.errors import UsageError
from mmdgs.files import read_json, read_tensors, tensors_to_bytes, to_json, write_atomically
from mmdgs.moments import DiagonalMoments, IsotropicMoments, LearnedMoments, Moments
from mmdgs.networks.registry import build_network, nearest
from mmdgs.noise import NoiseLevel
from mmdgs.version import __version__

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT = 1
KINDS: dict[str, tuple[type, ...]] = {
    "network": (str,),
    "param": (str,),
    "shape": (list,),
    "options": (dict,),
    "sigma": (float, int, type(None)),
    "alpha": (float, int),
    "classes": (list,),
    "isotropic_variance": (float, int, type(None)),
    "trained_on": (str,),
}
"""What each key of config.json holds."""


class SquaredErrorEnergy(nn.Module):
    """The energy ||x - net(x)||^2 / 2 (the authors' code), one value a row."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.with_level = takes_level(network)

    def forward(self, x: Tensor, level: NoiseLevel) -> Tensor:
        reconstruction = self.network(x, level) if self.with_level else self.network(x)
        return 0.5 * (x - reconstruction).flatten(1).square().sum(1)


def _squared_error(network: Network) -> Denoiser:
    return energy_denoiser(SquaredErrorEnergy(network))


DENOISERS: dict[str, Callable[[Network], Denoiser]] = {
    "energy": energy_denoiser,
    "energy-squared": _squared_error,
    "score": score_denoiser,
    "noise": noise_denoiser,
    "clean": clean_denoiser,
    "velocity": velocity_denoiser,
}
"""What a network's output can mean, where it gives E[x | x_t]."""

MEAN_STD, CLASSES = "mean-std", "classes"
PARAMS = (*DENOISERS, MEAN_STD, CLASSES)
"""All a network's output can mean; the last two: mean and log standard deviation of p(x | x_t), and class logits."""


def check_param(param: str) -> None:
    """Refuse a parametrisation there is not."""
    if param not in PARAMS:
        like = nearest(param, PARAMS)
        raise UsageError(f"unknown parametrisation {param!r}{like}; choose one of {', '.join(PARAMS)}")


def check_level(alpha: float, sigma: float) -> None:
    """Refuse a noise level there cannot be."""
    try:
        NoiseLevel(alpha=alpha, sigma=sigma)
    except ValueError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build a model: what is in config.json."""

    network: str
    param: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    sigma: float | None = None
    alpha: float = 1.0
    classes: tuple[str, ...] = ()
    isotropic_variance: float | None = None
    trained_on: str = ""

    def __post_init__(self) -> None:
        check_param(self.param)
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "classes", tuple(self.classes))
        if not self.shape or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise UsageError(f"shape must be the shape of one example, such as [1, 28, 28], got {self.shape}")
        if self.param == CLASSES and not self.classes:
            raise UsageError("a classifier needs the names of its classes, and its data labels")
        if self.param != CLASSES and self.sigma is None:
            raise UsageError(f"a model with parametrisation {self.param!r} needs sigma, the noise level it is for")
        if self.sigma is not None:
            check_level(self.alpha, self.sigma)
        if self.isotropic_variance is not None and not 0 < self.isotropic_variance < math.inf:
            raise UsageError(f"isotropic_variance must be positive and finite, got {self.isotropic_variance}")

    @property
    def outputs(self) -> int:
        """Numbers (or channels) that the network puts out."""
        if self.param == CLASSES:
            return len(self.classes)
        return self.shape[0] * (2 if self.param == MEAN_STD else 1)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: object) -> ModelConfig:
        """Checked: every key known, none missing."""
        known = [f.name for f in dataclasses.fields(cls)]
        values = {key: value for key, value in content.items() if key not in ("mmdgs_format", "mmdgs_version")}
        if content.get("mmdgs_format") != FORMAT:
            raise UsageError(f"{where} is no model of mmdgs: it has no mmdgs_format {FORMAT}")
        for key in values:
            if key not in known:
                raise UsageError(f"{where} has an unknown key {key!r}{nearest(key, known)}")
        missing = {"network", "param", "shape"} - values.keys()
        if missing:
            raise UsageError(f"{where} lacks {', '.join(sorted(missing))}")
        for key, value in values.items():
            kinds = KINDS[key]
            if not isinstance(value, kinds) or isinstance(value, bool):
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise UsageError(f"{where}: {key} must be {names}, got {value!r}")
        try:
            return cls(**values)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return {"mmdgs_format": FORMAT, "mmdgs_version": __version__, **dataclasses.asdict(self)}


class Model:
    """A network with its configuration: the denoiser, the noise level, the posterior.

    `model.denoiser` goes into any moments estimator and `model.posterior()` is the estimator one wants first;
    both at `model.level`.
    """

    def __init__(self, config: ModelConfig, network: nn.Module | None = None, *, seed: int = 0) -> None:
        self.config = config
        built = build_network(config.network, config.shape[0], config.outputs, config.options, seed=seed)
        self.network = built if network is None else network

    @property
    def level(self) -> NoiseLevel:
        """The noise level the model was trained at."""
        if self.config.sigma is None:
            raise UsageError("a classifier has no noise level")
        return NoiseLevel(alpha=self.config.alpha, sigma=self.config.sigma)

    @property
    def denoiser(self) -> Denoiser:
        """E[x | x_t] as a function; a model with mean and std heads has its mean, a classifier none."""
        return self.denoiser_of(self.network)

    def denoiser_of(self, network: Network) -> Denoiser:
        """The denoiser of another network in place of this model's (compiled, say), with the same meaning."""
        if self.config.param not in DENOISERS:
            raise UsageError(
                f"a model with parametrisation {self.config.param!r} is no denoiser; "
                "use model.posterior() for one with mean and std heads"
            )
        return DENOISERS[self.config.param](network)

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

    def save_pretrained(self, folder: Path | str, *, card: str | None = None, dtype: torch.dtype | None = None) -> Path:
        """Write the folder of this model (hub format), weights in `dtype` if given. Each file whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, tensors_to_bytes(self.network.state_dict(), dtype))
        write_atomically(folder / CONFIG, to_json(self.config.to_json()))
        if card is not None or not (folder / CARD).exists():
            write_atomically(folder / CARD, (card or model_card(self)).encode())
        return folder

    @classmethod
    def from_pretrained(cls, source: Path | str, *, revision: str | None = None, token: str | None = None) -> Model:
        """A model from its folder, or from a repository of the Hugging Face hub ("owner/name")."""
        folder = Path(source)
        if not folder.is_dir():
            folder = _from_hub(str(source), revision, token)
        if not (folder / CONFIG).is_file():
            raise UsageError(f"{folder} holds no model: there is no {CONFIG} in it")
        model = cls(ModelConfig.from_json(read_json(folder / CONFIG), folder / CONFIG))
        load_weights(model.network, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
        model.network.requires_grad_(False).eval()
        return model

    def push_to_hub(self, repository: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload to the Hugging Face hub as "owner/name"; returns the address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="mmdgs model")
        return str(address)


def _from_hub(name: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(f"there is no model folder {name!r} here")
    try:
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=[CONFIG, WEIGHTS, CARD])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{name!r} is neither a model folder here nor could it be fetched from the Hugging Face hub ({reason})"
        ) from error
    return Path(found)


def load_weights(network: nn.Module, tensors: Mapping[str, Tensor], where: object) -> None:
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
        raise UsageError(f"{where} is from another architecture than its configuration says: tensors {', '.join(said)}")
    bad = [key for key, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise UsageError(f"{where} holds values that are not finite, in {bad[0]}")
    network.load_state_dict(dict(tensors))


def load(source: Path | str, *, device: torch.device | str = "cpu") -> Model:
    """A model from a training run's folder, a model's folder, the hub ("owner/name"), or one that ships ("mnist")."""
    return Model.from_pretrained(_shipped(str(source)) or source).to(device)


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


def _shipped(name: str) -> Path | None:
    """The folder of a model that comes with the package (inside it, or beside `src` in a source tree)."""
    if name not in SHIPPED or Path(name).is_dir():
        return None
    here = Path(__file__).resolve().parent
    for root in (here / "weights", here.parents[1] / "weights"):
        if (root / SHIPPED[name] / CONFIG).is_file():
            return root / SHIPPED[name]
    raise UsageError(f"the weights of {name!r} did not come with this installation; look for them in the source tree")


def model_card(model: Model, training: Mapping[str, Any] | None = None) -> str:
    """README.md of a model: what it is, how to use it, and (given `training`) the command and its numbers."""
    config = model.config
    parameters = sum(p.numel() for p in model.network.parameters())
    facts = {
        "network": f"{config.network}, {parameters / 1e6:.2f} million parameters",
        "output": config.param,
        "shape": "x".join(map(str, config.shape)),
        "noise level": "none" if config.sigma is None else f"sigma {config.sigma:g}, alpha {config.alpha:g}",
        "trained on": config.trained_on or "not said",
    }
    if config.isotropic_variance is not None:
        facts["isotropic variance"] = f"{config.isotropic_variance:.6g}"
    lines = ["---", "library_name: mmdgs", "license: mit", "tags: [energy-based-model, score-matching]", "---", ""]
    lines += [f"# {config.trained_on or 'A'} {config.param} model", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    use = ["import mmdgs", "", 'model = mmdgs.load("THIS FOLDER")']
    if config.param == CLASSES:
        use += ["logits = model.network(images)"]
    else:
        use += ["q = model.posterior()(x_t, model.level, generator=generator)   # mean, covariance, samples"]
    lines += ["", "```python", *use, "```", ""]
    if training:
        lines += ["## Training", "", "```", str(training["command"]), "```", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_shown(value)} |" for key, value in training.items() if key != "command"]
        lines += [""]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
