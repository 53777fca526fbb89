"""Batches that do not fit in memory: halved, with the same numbers, or refused in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mmdgs.data import image_set
from mmdgs.denoisers import clean_denoiser
from mmdgs.errors import CovarianceTooLargeError, UsageError
from mmdgs.evaluation import evaluate
from mmdgs.memory import Batches, evenly
from mmdgs.metrics.features import image_features
from mmdgs.metrics.inception_file import Inception
from mmdgs.models import CLASSES, Model, ModelConfig
from mmdgs.models.memory import bytes_kept
from mmdgs.moments import IsotropicMoments, SpectralMoments
from mmdgs.moments.fitted import _fitting
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, seeded

LEVEL = NoiseLevel(sigma=0.5)
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried"
)


class Hungry:
    """A denoiser that shrinks, or says that memory is short for more than so many rows."""

    def __init__(self, most: int) -> None:
        self.most, self.tried = most, []

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        self.tried.append(len(x_t))
        if len(x_t) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.5 * x_t


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """What one test found to fit does not tell the next."""
    _fitting.clear()
    yield
    _fitting.clear()


def images(count: int) -> Tensor:
    return torch.rand(count, 3, 4, 4, dtype=torch.float64, generator=seeded(3))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no"),
        RuntimeError(CPU_MESSAGE),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_ranges_are_halved_until_they_fit_and_stay_so(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def work(first: int, last: int) -> range:
        if last - first > 3:
            raise error
        return range(first, last)

    batches = Batches(16, "rows")
    with caplog.at_level(logging.WARNING, "mmdgs"):
        assert [*batches.over(20, work, 3)] == [range(a, min(a + 2, 20)) for a in range(3, 20, 2)]
    assert [record.message for record in caplog.records] == [
        "16 rows at a time do not fit in memory; going on with 8",
        "8 rows at a time do not fit in memory; going on with 4",
        "4 rows at a time do not fit in memory; going on with 2",
    ]
    assert [*batches.over(5, work)] == [range(0, 2), range(2, 4), range(4, 5)]
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("count", "most", "processes", "size"),
    [(7, 10, 1, 7), (10, 10, 1, 10), (11, 10, 1, 6), (1_500, 1_493, 1, 750), (1, 10, 4, 1),
     (1_000, 1_493, 4, 250),
     (41, 10, 2, 7)],
)  # fmt: skip
def test_batches_are_alike_and_as_many_for_each_process(
    count: int, most: int, processes: int, size: int
) -> None:
    assert evenly(count, most, processes) == size
    sizes = [min(size, count - first) for first in range(0, count, size)]
    assert max(sizes) <= most
    assert 2 * min(sizes) >= max(sizes)  # one compiled program serves them all


@pytest.mark.parametrize(
    "error", [RuntimeError("the sizes differ"), CovarianceTooLargeError("d is too large")]
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    def work(first: int, last: int) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        [*Batches(4, "rows").over(4, work)]


def test_where_not_one_row_fits_there_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="examples to fit on"):
        IsotropicMoments.fit(Hungry(0), images(4), LEVEL, generator=Streams(0, 4))


def test_fits_are_the_same_in_smaller_parts(caplog: pytest.LogCaptureFixture) -> None:
    x, levels = images(40), [LEVEL, NoiseLevel(sigma=0.1)]
    for kind in (IsotropicMoments, SpectralMoments):
        _fitting.clear()
        caplog.clear()
        plain = kind.fit(Hungry(100), x, levels, generator=Streams(1, 40))
        hungry = Hungry(11)
        with caplog.at_level(logging.WARNING, "mmdgs"):
            cut = kind.fit(hungry, x, levels, generator=Streams(1, 40))
        torch.testing.assert_close(cut.variances.values, plain.variances.values, rtol=1e-12, atol=0)
        assert max(hungry.tried[3:]) <= 11, "the second level must not try what did not fit"
        assert [record.message for record in caplog.records if "memory" in record.message] == [
            "40 examples to fit on at a time do not fit in memory; going on with 20",
            "20 examples to fit on at a time do not fit in memory; going on with 10",
        ]


class HungryFeatures(nn.Module):
    """Six features of an image; more than so many images at a time do not fit."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1))  # a model is known by its weights
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        x = x.float()
        return torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], 1)


def test_features_are_the_same_in_smaller_batches() -> None:
    some = image_set((255 * images(50)).to(torch.uint8), "some")
    found = [
        image_features(some, Inception("fake", "0", HungryFeatures(most)), keep=True, batch_size=32)
        for most in (100, 5)
    ]
    assert torch.equal(found[0].features, found[1].features)
    assert torch.equal(found[0].moments.scatter, found[1].moments.scatter)


def test_classes_are_the_same_in_smaller_batches() -> None:
    some = image_set((255 * images(50)).to(torch.uint8), "some")
    config = ModelConfig("classifier", CLASSES, (3, 4, 4), {}, classes=tuple("abcdef"))
    options = {"metrics": ["classes"], "progress": None}
    whole, parts = (Model.build(config, HungryFeatures(most)) for most in (1000, 7))
    evaluations = [evaluate(some, some, classifier=judge, **options) for judge in (whole, parts)]
    assert evaluations[0].values["classes"] == evaluations[1].values["classes"]


def test_the_bytes_that_a_pass_keeps_are_those_of_its_pixels() -> None:
    """A convolution keeps its three channels, and the tanh behind it its eight."""
    with torch.random.fork_rng():
        network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1))
    denoiser = clean_denoiser(lambda x, level: network(x))
    model = Model(denoiser, network, [LEVEL], shape=(3, None, None))
    assert bytes_kept(model) == 4 * (3 + 8)
