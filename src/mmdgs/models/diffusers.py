"""Networks of Hugging Face diffusers (UNet2DModel, with the schedule of a scheduler) as denoisers.

Their levels are variance preserving, alpha_t^2 = abar_t, sigma_t^2 = 1 - abar_t, for integer timesteps t. A level of
ratio r = sigma / alpha is rescaled to alpha = (1 + r^2)^(-1/2), and its timestep is interpolated in log r. Data lie in
[-1, 1].
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure
from mmdgs.denoisers import explain_mismatch
from mmdgs.errors import UsageError, first_line, shown
from mmdgs.files import read_json
from mmdgs.models.levels import TrainedLevels
from mmdgs.models.model import CONFIG, Model
from mmdgs.models.weights import check_finite, counts_in
from mmdgs.networks.declared import parameters_as_in
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.reading import reading

logger = logging.getLogger("mmdgs")

NETWORK = "UNet2DModel"
OURS = "MomentScheduler"  # in pipelines saved with it: DDPM's schedule
INDEX, SCHEDULER = "model_index.json", "scheduler_config.json"
WEIGHTS = "diffusion_pytorch_model"  # and .safetensors; there may be a variant's name, or a number, between
ENCODERS = ("vae", "vqvae", "movq")  # parts of a pipeline on latents
INTERVAL = (-1.0, 1.0)
SIZE, MOST_SIDE = 32, 1 << 14
MOST_TIMESTEPS = 100_000
"""The largest whole number in a scheduler's configuration: it makes tables of num_train_timesteps."""
MOST_PADDING = 16
"""Pixels that images are padded by before they are halved; networks have 0 or 1."""
LEAST_SIGNAL = 1e-12
"""The abar that stands for zero: schedules rescaled to end in pure noise have no ratio there. Others end above it."""

Prediction = Callable[[Tensor, Tensor, Any, Any], Tensor]

PREDICTIONS: dict[str, Prediction] = {
    "epsilon": lambda out, x_t, alpha, sigma: (x_t - sigma * out) / alpha,
    "sample": lambda out, x_t, alpha, sigma: out,
    "v_prediction": lambda out, x_t, alpha, sigma: alpha * x_t - sigma * out,
}
"""E[x | x_t] from a network's output at a variance-preserving level, by diffusers' names of what it predicts."""


def require_diffusers() -> Any:
    """The module diffusers, which is optional."""
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise UsageError("this needs diffusers, which is not installed: pip install mmdgs[diffusers]") from error


def preserving_level(signal: float) -> NoiseLevel:
    """The variance-preserving level with alpha^2 = `signal`, a float32 number of diffusers: 1 - signal is exact."""
    signal = max(signal, LEAST_SIGNAL)
    return NoiseLevel(alpha=math.sqrt(signal), sigma=math.sqrt(1 - signal))


def schedule_levels(scheduler: Any) -> tuple[NoiseLevel, ...]:
    """The levels of a scheduler of diffusers, the noisiest (the last timestep) first."""
    cumulative = getattr(scheduler, "alphas_cumprod", None)
    if cumulative is None:
        raise UsageError(
            f"the scheduler {type(scheduler).__name__} has no alphas_cumprod: only variance-preserving schedules with "
            "discrete timesteps are understood (DDPM, DDIM, PNDM, Euler ...)"
        )
    return tuple(preserving_level(one) for one in reversed(torch.as_tensor(cumulative).tolist()))


def prediction_of(scheduler: Any) -> Prediction:
    """How the clean image follows from what the network of a scheduler predicts."""
    name = scheduler.config.get("prediction_type", "epsilon")
    if name not in PREDICTIONS:
        raise UsageError(f"unknown prediction_type {name!r} of the scheduler; expected one of {', '.join(PREDICTIONS)}")
    return PREDICTIONS[name]


@dataclass(frozen=True)
class DiffusersDenoiser:
    """E[x | x_t] by a UNet2DModel at any level; arithmetic in the dtype of x_t, the network in its own."""

    unet: Any = field(repr=False)
    trained: TrainedLevels
    prediction: Prediction

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self._at(x_t, *self._numbers(level))

    def pure(self, level: AnyLevel) -> Pure:
        """For the fast path."""
        return Pure(self._at, level.alpha, self._numbers(level), self.unet, self)

    def _numbers(self, level: AnyLevel) -> tuple[Any, Any, Any, Any]:
        """A factor for x_t, the timestep, alpha and sigma of the variance-preserving level with the same ratio."""
        ratio = level.sigma / level.alpha
        alpha = (1 + ratio**2) ** -0.5
        return alpha / level.alpha, self.trained.place(level), alpha, ratio * alpha

    def _at(self, x_t: Tensor, factor: Any, place: Any, alpha: Any, sigma: Any) -> Tensor:
        x = factor * x_t
        return self.prediction(self._output(x, place), x, alpha, sigma)

    def _output(self, x: Tensor, place: float | Tensor) -> Tensor:
        """The network's output; one that predicts variances too has them in further channels."""
        timestep = torch.as_tensor(place, dtype=torch.float32, device=x.device).reshape(-1)
        if self.unet.config.time_embedding_type == "learned":  # a table: there is nothing between timesteps
            timestep = timestep.round().long()
        try:
            (out,) = self.unet(x.to(self.unet.dtype), timestep, return_dict=False)
        except RuntimeError as error:
            explain_mismatch(self.unet, x, error)
            raise
        return out[:, : x.shape[1]].to(x.dtype)


def from_pipeline(unet: Any, scheduler: Any, source: str, *, size: int | None = None) -> Model:
    """The model of a UNet2DModel trained with the schedule of a scheduler; the network stays where it is."""
    config = unet.config
    _require_unconditional(type(unet).__name__, config, source)
    levels = schedule_levels(scheduler)
    try:
        trained = TrainedLevels(levels)
    except UsageError as error:
        raise UsageError(f"the schedule of {source}: {error}") from error
    side = size or config.sample_size or SIZE
    sides = side if isinstance(side, list | tuple) else (side, side)
    if len(sides) != 2 or any(type(one) is not int or not 0 < one <= MOST_SIDE for one in sides):
        raise UsageError(f"the sample_size of {source} must be one side of images or two, got {shown(side)}")
    shape = (config.in_channels, *sides)
    denoiser = DiffusersDenoiser(unet, trained, prediction_of(scheduler))
    return Model(denoiser, unet, levels, shape, INTERVAL, source)


def _require_unconditional(name: str, config: Mapping[str, Any], source: str) -> None:
    """Refuse networks that are not a function of (x_t, timestep) alone."""
    if name != NETWORK:
        raise UsageError(f"{source} holds a network {name}; of diffusers only {NETWORK} is understood")
    if config.get("class_embed_type") is not None or config.get("num_class_embeds") is not None:
        raise UsageError(f"{source} is conditional on class labels, which a denoiser does not get; use another model")
    if config.get("time_embedding_type") == "fourier":
        raise UsageError(f"{source} takes sigma, not a timestep (time_embedding_type 'fourier'); use another model")
    inputs, outputs = config["in_channels"], config["out_channels"]
    if outputs not in (inputs, 2 * inputs):  # twice: the variances too
        raise UsageError(f"{source} has {inputs} input and {outputs} output channels; expected as many, or twice")


def _require_images(folder: Path, source: str) -> None:
    """Refuse a pipeline whose network works on the latents of another."""
    index = read_json(folder / INDEX) if (folder / INDEX).is_file() else {}
    for encoder in ENCODERS:
        if encoder in index:
            raise UsageError(
                f"{source} denoises the latents of its {encoder}, not images; for the denoiser of the latents give "
                'subfolder="unet"'
            )


def network_folder(folder: Path) -> Path | None:
    """Where in a folder of diffusers the configuration of the network is: itself, or its folder unet."""
    for found in (folder, folder / "unet"):
        if (found / CONFIG).is_file() and "_class_name" in read_json(found / CONFIG):
            return found
    return None


def scheduler_file(folder: Path, unet: Path) -> Path | None:
    """The configuration of the scheduler that goes with a network: beside it, or in its pipeline."""
    places = [folder / "scheduler", folder, unet]
    if (unet.parent / INDEX).is_file():
        places.append(unet.parent / "scheduler")
    return next((place / SCHEDULER for place in places if (place / SCHEDULER).is_file()), None)


def read_scheduler(file: Path | None, source: str) -> Any:
    """The scheduler of a configuration, as diffusers makes it; DDPM's own where there is none."""
    diffusers = require_diffusers()
    if file is None:
        logger.warning("%s comes without a scheduler: taking DDPM's schedule and that it predicts the noise", source)
        return diffusers.DDPMScheduler()
    config = read_json(file)
    name = config.get("_class_name")
    kind: Any = getattr(diffusers, "DDPMScheduler" if name == OURS else name, None) if isinstance(name, str) else None
    if diffusers.SchedulerMixin not in getattr(kind, "__mro__", ()):
        raise UsageError(f"{file} names {shown(name)}, which is no scheduler of diffusers")
    for key, value in config.items():
        if isinstance(value, int) and not -MOST_TIMESTEPS <= value <= MOST_TIMESTEPS:
            raise UsageError(f"{file}: {key} must be at most {MOST_TIMESTEPS:,}, got {shown(value)}")
    with reading(file, "a scheduler that diffusers can make"):
        return kind.from_config(config)


def read_network(folder: Path) -> nn.Module:
    """The UNet2DModel of a folder, in float32, its attention written out so that it can be differentiated twice."""
    require_diffusers()
    from diffusers import UNet2DModel
    from diffusers.models.attention_processor import Attention, AttnProcessor

    if not list(folder.glob(f"{WEIGHTS}*.safetensors")):
        pickled = list(folder.glob(f"{WEIGHTS}*.bin"))
        advice = "its weights are a pickle: convert them with `mmdgs convert FOLDER --out NEW`" if pickled else ""
        raise UsageError(f"there is no {WEIGHTS}.safetensors in {folder}; {advice or 'is it a whole copy?'}")
    _check_numbers(folder / CONFIG, UNet2DModel)
    try:
        held = {key: count for file in folder.glob(f"{WEIGHTS}*.safetensors") for key, count in counts_in(file).items()}
        with parameters_as_in(held, folder):
            network, found = UNet2DModel.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # of a wrong configuration diffusers raises nearly anything
        reason = first_line(error)
        raise UsageError(f"diffusers cannot load the network in {folder}: {reason}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise UsageError(
                f"{folder} holds weights of another architecture than its configuration says: "
                f"{kind.replace('_', ' ')} such as {sorted(map(str, found[kind]))[0]}"
            )
    check_finite(network.state_dict(), folder)
    for module in network.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
            module.register_forward_hook(_contiguous)
    return network.float().requires_grad_(False).eval()


def _check_numbers(file: Path, network: Any) -> None:
    """Refuse what is not a number in a configuration where the network takes one: some fail only when it runs."""
    config = read_json(file)
    for name, parameter in inspect.signature(network.__init__).parameters.items():
        kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
        if name not in config or not {int, float} & set(kinds) or not set(kinds) <= {int, float, types.NoneType}:
            continue
        value, most = config[name], MOST_PADDING if name == "downsample_padding" else MOST_TIMESTEPS
        if type(value) not in {*kinds, int} or (value is not None and not 0 <= value <= most):
            raise UsageError(f"{file}: {name} must be a number between 0 and {most:,}, got {shown(value)}")


def _contiguous(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """Attention leaves its output transposed in memory, and a group norm of that has no batched backward pass."""
    return out.contiguous()


def read_pipeline(folder: Path, source: str, *, size: int | None = None) -> Model:
    """The model in a folder of diffusers: a pipeline, or a UNet2DModel."""
    require_diffusers()
    unet = network_folder(folder)
    if unet is None:
        raise UsageError(f"{folder} holds no network of diffusers: there is no {CONFIG} in it, nor in its folder unet")
    _require_images(folder, source)
    config = read_json(unet / CONFIG)
    defaults = {"in_channels": 3, "out_channels": 3}
    with reading(folder, "a model of diffusers"):
        _require_unconditional(shown(config["_class_name"]).strip("'"), defaults | config, source)
        scheduler = read_scheduler(scheduler_file(folder, unet), source)
        prediction_of(scheduler), schedule_levels(scheduler)  # refused before the weights are read
        return from_pipeline(read_network(unet), scheduler, source, size=size)
