"""Networks of Hugging Face diffusers (UNet2DModel, with the schedule of a scheduler) as denoisers.

Their levels are variance preserving, alpha_t^2 = abar_t, sigma_t^2 = 1 - abar_t, for integer
timesteps t. A level of ratio r = sigma / alpha is rescaled to alpha = (1 + r^2)^(-1/2), and its
timestep is interpolated in log r. Data lie in [-1, 1].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure
from mmdgs.denoisers import explain_mismatch
from mmdgs.errors import UsageError, first_line, shown, unknown_name
from mmdgs.files import read_json
from mmdgs.lazy import optional
from mmdgs.models.levels import TrainedLevels
from mmdgs.models.model import Model
from mmdgs.models.weights import CONFIG, check_finite, counts_in
from mmdgs.networks.building import parameters_as_in
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.reading import reading

NETWORK = "UNet2DModel"
OURS = "MomentScheduler"  # in pipelines saved with it: DDPM's schedule
INDEX, SCHEDULER = "model_index.json", "scheduler_config.json"
WEIGHTS = "diffusion_pytorch_model"  # .safetensors; a variant's name or a number may be between
ENCODERS = ("vae", "vqvae", "movq")  # parts of a pipeline on latents
INTERVAL = (-1.0, 1.0)
SIZE, MOST_SIDE = 32, 1 << 14
MOST_TIMESTEPS = 100_000
"""The largest whole number in a scheduler's configuration: it makes tables of that length."""
LEAST_SIGNAL = 1e-12
"""The abar that stands for zero, where schedules end in pure noise and there is no ratio."""

Prediction = Callable[[Tensor, Tensor, Any, Any], Tensor]

PREDICTIONS: dict[str, Prediction] = {
    "epsilon": lambda out, x_t, alpha, sigma: (x_t - sigma * out) / alpha,
    "sample": lambda out, x_t, alpha, sigma: out,
    "v_prediction": lambda out, x_t, alpha, sigma: alpha * x_t - sigma * out,
}
"""E[x | x_t] from a network's output, by diffusers' names of what it predicts."""


def preserving_level(signal: float) -> NoiseLevel:
    """The variance-preserving level with alpha^2 = `signal`, a float32: 1 - signal is exact."""
    signal = max(signal, LEAST_SIGNAL)
    return NoiseLevel(alpha=math.sqrt(signal), sigma=math.sqrt(1 - signal))


def schedule_levels(scheduler: Any) -> tuple[NoiseLevel, ...]:
    """The levels of a scheduler of diffusers, the noisiest (the last timestep) first."""
    signals = getattr(scheduler, "alphas_cumprod", None)
    if signals is None:
        raise UsageError(
            f"the scheduler {type(scheduler).__name__} has no alphas_cumprod: only variance-"
            "preserving schedules with discrete timesteps are understood (DDPM, DDIM, Euler ...)"
        )
    return tuple(preserving_level(signal) for signal in reversed(torch.as_tensor(signals).tolist()))


def prediction_of(scheduler: Any) -> Prediction:
    """How the clean image follows from what the network of a scheduler predicts."""
    name = scheduler.config.get("prediction_type", "epsilon")
    if name not in PREDICTIONS:
        raise unknown_name("prediction_type", str(name), PREDICTIONS)
    return PREDICTIONS[name]


@dataclass(frozen=True)
class DiffusersDenoiser:
    """E[x | x_t] by a UNet2DModel at any level; arithmetic in the dtype of x_t."""

    unet: Any = field(repr=False)
    trained: TrainedLevels
    prediction: Prediction

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self._at(x_t, *self._numbers(level))

    def pure(self, level: AnyLevel) -> Pure:
        """For the fast path."""
        return Pure(self._at, level.alpha, self._numbers(level), self.unet, self)

    def _numbers(self, level: AnyLevel) -> tuple[Any, Any, Any, Any]:
        """A factor for x_t; timestep, alpha and sigma of the preserving level of the same ratio."""
        ratio = level.sigma / level.alpha
        alpha = (1 + ratio**2) ** -0.5
        return alpha / level.alpha, self.trained.place(level), alpha, ratio * alpha

    def _at(self, x_t: Tensor, factor: Any, place: Any, alpha: Any, sigma: Any) -> Tensor:
        x = factor * x_t
        return self.prediction(self._output(x, place), x, alpha, sigma)

    def _output(self, x: Tensor, place: float | Tensor) -> Tensor:
        """The network's output; one that predicts variances too has them in further channels."""
        timestep = torch.as_tensor(place, dtype=torch.float32, device=x.device).reshape(-1)
        if self.unet.config.time_embedding_type == "learned":  # a table of whole timesteps
            timestep = timestep.round().long()
        try:
            (out,) = self.unet(x.to(self.unet.dtype), timestep, return_dict=False)
        except RuntimeError as error:
            explain_mismatch(self.unet, x, error)
            raise
        return out[:, : x.shape[1]].to(x.dtype)


def from_pipeline(unet: Any, scheduler: Any, source: str, *, size: int | None = None) -> Model:
    """The model of a UNet2DModel trained with a scheduler's schedule; it stays in place."""
    config = unet.config
    _require_unconditional(type(unet).__name__, config, source)
    levels = schedule_levels(scheduler)
    try:
        trained = TrainedLevels(levels)
    except UsageError as error:
        raise UsageError(f"the schedule of {source}: {error}") from error
    side = size or config.sample_size or SIZE
    sides = side if isinstance(side, list | tuple) else (side, side)
    if len(sides) != 2 or any(type(n) is not int or not 0 < n <= MOST_SIDE for n in sides):
        raise UsageError(f"the sample_size of {source} must be one side or two, got {shown(side)}")
    denoiser = DiffusersDenoiser(unet, trained, prediction_of(scheduler))
    return Model(denoiser, unet, levels, (config.in_channels, *sides), INTERVAL, source)


def _require_unconditional(name: str, config: Mapping[str, Any], source: str) -> None:
    """Refuse networks that are not a function of (x_t, timestep) alone."""
    if name != NETWORK:
        raise UsageError(
            f"{source} holds a network {name}; of diffusers only {NETWORK} is understood"
        )
    if config.get("class_embed_type") is not None or config.get("num_class_embeds") is not None:
        raise UsageError(f"{source} is conditional on class labels, which a denoiser does not get")
    if config.get("time_embedding_type") == "fourier":
        raise UsageError(f"{source} takes sigma, not a timestep (time_embedding_type 'fourier')")
    inputs, outputs = config["in_channels"], config["out_channels"]
    if outputs not in (inputs, 2 * inputs):  # twice: the variances too
        raise UsageError(
            f"{source} has {inputs} input and {outputs} output channels; expected as many, or twice"
        )


def network_folder(folder: Path) -> Path | None:
    """Where a folder of diffusers has the network's configuration: in itself, or in unet."""
    for place in (folder, folder / "unet"):
        if (place / CONFIG).is_file() and "_class_name" in read_json(place / CONFIG):
            return place
    return None


def _read_scheduler(folder: Path, unet: Path, source: str) -> Any:
    """The scheduler beside a network or in its pipeline, as diffusers makes it; else DDPM's."""
    diffusers = optional("diffusers")
    places = [folder / "scheduler", folder, unet]
    places += [unet.parent / "scheduler"] if (unet.parent / INDEX).is_file() else []
    file = next((place / SCHEDULER for place in places if (place / SCHEDULER).is_file()), None)
    if file is None:
        logging.getLogger("mmdgs").warning(
            "%s comes without a scheduler: taking DDPM's schedule and that it predicts the noise",
            source,
        )
        return diffusers.DDPMScheduler()
    config = read_json(file)
    name = config.get("_class_name")
    kind: Any = getattr(diffusers, "DDPMScheduler" if name == OURS else str(name), None)
    if diffusers.SchedulerMixin not in getattr(kind, "__mro__", ()):
        raise UsageError(f"{file} names {shown(name)}, which is no scheduler of diffusers")
    for key, value in config.items():
        if isinstance(value, int) and not -MOST_TIMESTEPS <= value <= MOST_TIMESTEPS:
            raise UsageError(
                f"{file}: {key} must be at most {MOST_TIMESTEPS:,}, got {shown(value)}"
            )
    with reading(file, "a scheduler that diffusers can make"):
        return kind.from_config(config)


def _read_network(folder: Path) -> nn.Module:
    """The UNet2DModel of a folder, in float32, written so that it can be differentiated twice."""
    from diffusers import UNet2DModel
    from diffusers.models.attention_processor import Attention, AttnProcessor

    files = list(folder.glob(f"{WEIGHTS}*.safetensors"))
    if not files:
        raise UsageError(
            f"there is no {WEIGHTS}.safetensors in {folder}: is it a whole copy? Where its "
            "weights are a pickle: convert it with `mmdgs convert FOLDER --out NEW`"
        )
    try:
        held = {key: count for file in files for key, count in counts_in(file).items()}
        with parameters_as_in(held, folder):
            network, faults = UNet2DModel.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # of a wrong configuration diffusers raises nearly anything
        raise UsageError(
            f"diffusers cannot load the network in {folder}: {first_line(error)}"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if faults[kind]:
            raise UsageError(
                f"{folder} holds weights of another architecture than its configuration says: "
                f"{kind.replace('_', ' ')} such as {sorted(map(str, faults[kind]))[0]}"
            )
    check_finite(network.state_dict(), folder)
    for module in network.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
            # Its output is transposed in memory, and a group norm of that has no batched backward.
            module.register_forward_hook(lambda module, inputs, out: out.contiguous())
    return network.float().requires_grad_(False).eval()


def read_pipeline(folder: Path, source: str, *, size: int | None = None) -> Model:
    """The model in a folder of diffusers: a pipeline, or a UNet2DModel."""
    unet = network_folder(folder)
    if unet is None:
        raise UsageError(
            f"{folder} holds no model that is understood: expected {CONFIG} of mmdgs or of a "
            f"{NETWORK} in it or in its folder unet"
        )
    optional("diffusers")
    index = read_json(folder / INDEX) if (folder / INDEX).is_file() else {}
    for encoder in ENCODERS:
        if encoder in index:
            raise UsageError(
                f"{source} denoises the latents of its {encoder}, not images; for the denoiser of "
                'the latents give subfolder="unet"'
            )
    config = {"in_channels": 3, "out_channels": 3} | read_json(unet / CONFIG)
    with reading(folder, "a model of diffusers"):
        _require_unconditional(shown(config["_class_name"]).strip("'"), config, source)
        scheduler = _read_scheduler(folder, unet, source)
        prediction_of(scheduler), schedule_levels(scheduler)  # refused before the weights are read
        return from_pipeline(_read_network(unet), scheduler, source, size=size)
