"""Samples of a model, and pictures of them."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from nets import tiny_model
from PIL import Image
from torch import Tensor

import mmdgs
from mmdgs.data.pictures import BACKGROUND, GAP, image_grid, png
from mmdgs.errors import UsageError
from mmdgs.generation import Sampled, sample, start_from_noise
from mmdgs.models import Model, ModelConfig
from mmdgs.randomness import Streams, seeded


def drawn(model: Model, chains: int, **options: object) -> Sampled:
    return sample(model, chains, progress=None, **{"steps": 3, **options})


def points() -> Model:
    """An energy of points in the plane."""
    return Model.build(ModelConfig("mlp", "energy", (2,), {"width": 8, "depth": 2}, sigma=0.5))


MODELS = {"images": tiny_model, "points": points, "heads": lambda: tiny_model("mean-std")}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_chain_does_not_depend_on_its_companions(make) -> None:
    model = make()
    probes = {} if model.param == "mean-std" else {"probes": 2}
    options = {"steps": 2, "keep": [0, 1, 2], "posterior": model.posterior(**probes)}
    whole = drawn(model, 5, **options, seed=4)
    assert whole.x.shape == (3, 5, *model.config.shape)
    assert whole.steps == (0, 1, 2)
    for size in (1, 3, 100):
        # The same numbers, but products of other sizes round differently.
        torch.testing.assert_close(drawn(model, 5, **options, seed=4, batch_size=size).x, whole.x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drawn(model, 2, **options, seed=4).x, whole.x[:, :2], rtol=1e-4, atol=1e-4)
    assert (drawn(model, 5, **options, seed=5).x - whole.x).abs().max() > 1e-2
    assert (whole.x[1, 0] - whole.x[1, 1]).abs().max() > 1e-2


def test_step_by_step_it_is_the_gibbs_sampler() -> None:
    # x_t = x + sigma e, then a draw of q(x | x_t), with the numbers of the chain's own stream.
    model = tiny_model("mean-std")
    found = drawn(model, 3, steps=2, keep=[0, 1, 2], seed=6).x
    streams = Streams(7, 3)
    x = found[0]
    for step in (1, 2):
        x_t = mmdgs.add_noise(x, model.level, generator=streams)
        x = model.posterior()(x_t, model.level).sample(generator=streams).detach()
        torch.testing.assert_close(found[step], x)


def test_keeping_step_0_is_the_start() -> None:
    model = tiny_model("mean-std")
    start = torch.rand(5, 1, 8, 8, generator=seeded(0))
    found = drawn(model, 5, start=start, keep=[0, 3], batch_size=2)
    assert torch.equal(found.x[0], start)
    assert not torch.equal(found.x[1], start)
    torch.testing.assert_close(drawn(model, 5, keep=[0]).x[0], start_from_noise((1, 8, 8), 5, seed=0))
    torch.testing.assert_close(drawn(model, 5, start=start).x[0], found.x[1])  # by default the last step


def test_starts_are_uniform_for_images_and_normal_for_points() -> None:
    images = start_from_noise((1, 20, 20), 50, seed=0)
    n = images.numel()
    assert images.min() >= 0
    assert images.max() < 1
    assert abs(images.mean().item() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert images.min() < 10 / n
    assert images.max() > 1 - 10 / n
    normal = start_from_noise((2,), 5_000, seed=0)
    assert abs(normal.mean().item()) < 5 / 10_000**0.5
    assert abs(normal.square().mean().item() - 1) < 5 * (2 / 10_000) ** 0.5
    later = start_from_noise((1, 20, 20), 10, seed=0, first_chain=40)
    assert torch.equal(later, images[40:])


def test_another_posterior_in_place_of_the_models_own() -> None:
    model = tiny_model(isotropic_variance=0.01)
    own, other = drawn(model, 2), drawn(model, 2, posterior=model.posterior("isotropic"))
    assert not torch.equal(own.x, other.x)
    # With hardly any variance a step from clean data adds noise and takes it away: the mean alone is left.
    still = tiny_model(isotropic_variance=1e-12)
    x = drawn(still, 2, steps=1, posterior=still.posterior("isotropic"), seed=2).x[0]
    x_t = mmdgs.add_noise(start_from_noise((1, 8, 8), 2, seed=2), still.level, generator=Streams(3, 2))
    torch.testing.assert_close(x, still(x_t, still.level).detach(), rtol=0, atol=1e-5)


def test_repairs_are_counted_over_all_chains() -> None:
    # The score 3 x gives the variance sigma^2 (1 + 3 sigma^2) > 0, and -8 x a negative one: all are repaired.
    class Linear(torch.nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.tensor(slope))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x

    for slope, expected in ((3.0, 0.0), (-8.0, 1.0)):
        model = Model.build(tiny_model("score").config, Linear(slope))
        assert drawn(model, 5, steps=2, batch_size=2).repaired == pytest.approx(expected)


@pytest.mark.parametrize(
    ("chains", "options", "message"),
    [
        (0, {}, "at least one chain and one step, got chains=0"),
        (1, {"steps": 0}, "steps=0"),
        (1, {"keep": [4]}, "keep must hold steps between 0 and 3, got (4,)"),
        (1, {"keep": [-1]}, "keep must hold steps between 0 and 3, got (-1,)"),
        (3, {"start": torch.zeros(2, 1, 8, 8)}, "start must have shape (3, 1, 8, 8), got (2, 1, 8, 8)"),
        (2, {"start": torch.zeros(2, 8, 8)}, "start must have shape (2, 1, 8, 8), got (2, 8, 8)"),
        (2, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_requests_that_cannot_be(chains: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(tiny_model(), chains, **options)


def test_a_classifier_cannot_be_sampled() -> None:
    model = Model.build(ModelConfig("classifier", "classes", (1, 12, 12), {"width": 4}, classes=("a", "b")))
    with pytest.raises(UsageError, match="'classes' is no denoiser"):
        drawn(model, 1)


# --- pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("count", "columns", "shape"), [(5, None, (2, 3)), (4, None, (2, 2)), (5, 5, (1, 5)), (1, 2, (1, 2))]
)
def test_tiles_are_where_they_should_be(channels: int, count: int, columns: int | None, shape: tuple[int, int]) -> None:
    height, width = 4, 6
    x = torch.rand(count, channels, height, width, generator=seeded(0))
    picture = image_grid(x, columns)
    rows, across = shape
    assert picture.dtype == np.uint8
    whole = (rows * (height + GAP) + GAP, across * (width + GAP) + GAP)
    assert picture.shape == (whole if channels == 1 else (*whole, 3))
    inside = np.zeros(picture.shape, dtype=bool)
    for i in range(count):
        top, left = GAP + (i // across) * (height + GAP), GAP + (i % across) * (width + GAP)
        tile = picture[top : top + height, left : left + width]
        inside[top : top + height, left : left + width] = True
        expected = (255 * x[i]).round().byte()
        np.testing.assert_array_equal(tile, expected[0] if channels == 1 else expected.permute(1, 2, 0))
    assert (picture[~inside] == BACKGROUND).all()


def test_values_outside_the_range_are_clamped() -> None:
    picture = image_grid(torch.tensor([-3.0, 0.0, 0.5, 1.0, 7.0]).reshape(1, 1, 1, 5))
    assert picture[GAP, GAP:-GAP].tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 2, 4, 4), (0, 1, 4, 4)])
def test_what_is_no_set_of_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got shape {shape}")):
        image_grid(torch.zeros(shape))


def test_a_png_holds_each_pixel_as_a_square() -> None:
    picture = image_grid(torch.rand(3, 3, 4, 4, generator=seeded(0)))
    with Image.open(io.BytesIO(png(picture, scale=2))) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image)
    np.testing.assert_array_equal(pixels, picture.repeat(2, axis=0).repeat(2, axis=1))
