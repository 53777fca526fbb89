"""Image evaluation: each measure against a known answer, then the whole from files to a record."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import fake_known, fake_script
from nets import save_pictures
from torch import Tensor
from typer.testing import CliRunner

from mmdgs import cli, evaluation, metrics
from mmdgs.data import ImageSet, image_set, load_samples
from mmdgs.errors import UsageError
from mmdgs.evaluation import Evaluation, check_comparable, random_subset, read_evaluations
from mmdgs.metrics import Inception, features, inception_file, neighbours
from mmdgs.metrics.inception import prepared
from mmdgs.models import load
from mmdgs.randomness import seeded

run = CliRunner().invoke


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def pictures(
    count: int, *, seed: int = 0, size: int = 12, channels: int = 3, name: str = "some"
) -> ImageSet:
    shape = (count, channels, size, size)
    return ImageSet(
        name, "samples", torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8)
    )


# --- kernel distance and Inception score


def test_the_kernel_distance_is_the_double_sum_over_different_rows() -> None:
    a, b = normals(7, 3), 0.5 * normals(9, 3, seed=1) + 0.3

    def kernel(x: Tensor, y: Tensor) -> float:
        return ((x @ y / 3 + 1) ** 3).item()

    def by_hand(x: Tensor, y: Tensor) -> float:
        within = sum(
            kernel(rows[i], rows[j]) / (len(rows) * (len(rows) - 1))
            for rows in (x, y)
            for i in range(len(rows))
            for j in range(len(rows))
            if i != j
        )
        return within - 2 * sum(kernel(i, j) for i in x for j in y) / (len(x) * len(y))

    # A subset of 7 rows of 9 is random: over all of a and 7 rows of b there is nothing to draw.
    whole = metrics.kernel_distance(a, b[:7])
    assert whole.mean == pytest.approx(by_hand(a, b[:7]), rel=1e-10)
    assert (whole.parts, whole.size, whole.std) == (1, 7, 0)
    # Random subsets average to the value of the whole sets.
    many = metrics.kernel_distance(a, b, subsets=2_000)
    assert many.mean == pytest.approx(by_hand(a, b), abs=5 * many.std / math.sqrt(2_000))
    assert many.std > 0.01


def test_the_kernel_distance_of_equal_laws_is_zero_on_average_and_negative_half_the_time() -> None:
    pairs = ((normals(10, 4, seed=i), normals(10, 4, seed=1000 + i)) for i in range(400))
    values = torch.tensor([metrics.kernel_distance(*pair, subsets=1).mean for pair in pairs])
    assert abs(values.mean()) < 4 * values.std() / 20
    assert 0.3 < (values < 0).double().mean() < 0.8
    shifted = normals(200, 4, seed=1) + 1
    assert metrics.kernel_distance(normals(200, 4), shifted, subset_size=50).mean > 1


def test_distances_agree_with_torchmetrics() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fid = pytest.importorskip("torchmetrics.image.fid")
        kid = pytest.importorskip("torchmetrics.image.kid")

    class Passing(torch.nn.Module):
        num_features = 5

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    ours, theirs = normals(60, 5) + 0.2, 1.5 * normals(60, 5, seed=1)
    shape = (60, 5, 1, 1)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        frechet = fid.FrechetInceptionDistance(Passing(), input_img_size=(5, 1, 1), normalize=False)
        kernel = kid.KernelInceptionDistance(Passing(), subsets=1, subset_size=60)
        for metric in (frechet.set_dtype(torch.float64), kernel):
            metric.update(theirs.reshape(shape), real=True)
            metric.update(ours.reshape(shape), real=False)
        # All rows are one subset, so that nothing is drawn.
        assert metrics.kernel_distance(ours, theirs, subsets=1).mean == pytest.approx(
            kernel.compute()[0].item(), rel=1e-6
        )
        assert metrics.frechet_distance(ours, theirs) == pytest.approx(
            frechet.compute().item(), rel=1e-4
        )


def test_the_inception_score_of_known_probabilities() -> None:
    # Certain, and all of k classes alike: k. All rows alike: 1. One half certain, the other
    # undecided: known too.
    certain = torch.eye(4, dtype=torch.float64).repeat(10, 1)
    assert metrics.inception_score(certain).mean == pytest.approx(4)
    assert metrics.inception_score(torch.full((30, 4), 0.25)).mean == pytest.approx(1)
    mixed = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64).repeat(10, 1)
    gain = 0.5 * math.log(1 / 0.75) + 0.25 * math.log(0.5 / 0.75) + 0.25 * math.log(0.5 / 0.25)
    gained = metrics.inception_score(mixed)
    assert gained.mean == pytest.approx(math.exp(gain), rel=1e-12)
    assert (gained.parts, gained.size) == (10, 2)
    assert gained.std == pytest.approx(0, abs=1e-12)
    # Two halves of score 2 and 1: the spread is over the parts.
    uneven = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert metrics.inception_score(uneven, splits=2).mean == pytest.approx(1.5)
    assert metrics.inception_score(uneven, splits=2).std == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least 10 rows"):
        metrics.inception_score(torch.full((9, 4), 0.25))


# --- neighbours


def test_precision_and_recall_of_constructed_sets() -> None:
    left, right = normals(30, 4), normals(30, 4, seed=1) + 100
    both = torch.cat([left, right])
    assert metrics.precision_recall(both, both) == metrics.PrecisionRecall(1, 1)
    assert metrics.precision_recall(left, right) == metrics.PrecisionRecall(0, 0)
    # Samples of one mode of two are all among the data, and reach half of it; and the other way
    # round.
    assert metrics.precision_recall(left, both) == metrics.PrecisionRecall(1, 0.5)
    assert metrics.precision_recall(both, left) == metrics.PrecisionRecall(0.5, 1)


@pytest.mark.parametrize("numbers", [1, 40, 1 << 22])
def test_distances_do_not_depend_on_how_many_rows_are_taken_at_a_time(numbers: int) -> None:
    x, y = normals(13, 4), normals(9, 4, seed=1)
    blocks = list(neighbours._rows(x, y, numbers))
    assert [row for rows, _ in blocks for row in range(rows.start, rows.stop)] == list(range(13))
    distances = torch.cat([block for _, block in blocks])
    torch.testing.assert_close(distances, torch.cdist(x, y).square(), rtol=1e-10, atol=1e-10)


def test_a_point_is_within_reach_up_to_the_kth_neighbour() -> None:
    # Around 0 the third neighbour is 3 away; the other centres' balls end at 4 (1 + 3), 4 (2 + 2)
    # and 6 (3 + 3).
    centres = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    far = 1000 + torch.arange(3, dtype=torch.float64)[:, None]
    for x, inside in ((-3.0, True), (-3.01, False), (6.0, True), (6.01, False)):
        samples = torch.cat([torch.tensor([[x]], dtype=torch.float64), far])
        assert metrics.precision_recall(samples, centres).precision == (0.25 if inside else 0)
    with pytest.raises(ValueError, match="3 neighbours need more than 3 rows"):
        metrics.precision_recall(centres[:3], centres)
    with pytest.raises(ValueError, match="one dimension"):
        metrics.precision_recall(centres, torch.zeros(5, 2))


def test_duplicates_count_as_within_reach_in_single_precision() -> None:
    # Every radius is zero, and products of other shapes round differently.
    rows = (normals(37, 2048) * 10 + 5).float()
    copies = rows[:1].repeat(4, 1)
    assert metrics.precision_recall(copies, rows.repeat(5, 1)) == metrics.PrecisionRecall(1, 1 / 37)


def test_diversity_is_the_mean_distance_to_the_nearest_other() -> None:
    grey = torch.tensor([0, 0, 51, 255], dtype=torch.uint8)[:, None, None, None].expand(4, 3, 5, 5)
    shades = metrics.diversity(grey)
    assert shades.distance == pytest.approx((0 + 0 + 0.2 + 0.8) / 4)
    assert (shades.duplicates, shades.count) == (0.5, 4)
    images = pictures(2_100, size=2).images  # more than one block
    levels = images.flatten(1).double() / 255
    distances = torch.cdist(levels, levels) / math.sqrt(levels.shape[1])
    distances.fill_diagonal_(math.inf)
    expected = distances.min(1).values.mean().item()
    assert metrics.diversity(images).distance == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="at least 2 uint8 images"):
        metrics.diversity(grey[:1])


# --- features and their cache


class Counting(torch.nn.Module):
    """Twelve features of prepared images, and how many images it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


def counting(sha256: str = "one", *, head: bool = False) -> Inception:
    weights = normals(1008, 12, seed=5).float() if head else None
    return Inception("counting.pt", sha256, Counting(), weights)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and the fake network's output as the known one."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(inception_file.ENVIRONMENT, raising=False)
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    return tmp_path / "cache" / "features"


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_features_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    monkeypatch.setattr(features, "BLOCK", 16)  # several blocks
    images = pictures(50)
    features_of_all = metrics.features.image_features(
        images, counting(), keep=True, batch_size=batch_size
    )
    expected = Counting()(prepared(images.images))
    torch.testing.assert_close(features_of_all.features, expected, rtol=1e-5, atol=1e-6)
    assert features_of_all.moments.count == 50
    torch.testing.assert_close(
        features_of_all.moments.covariance, torch.cov(expected.double().mT), rtol=1e-4, atol=1e-9
    )
    assert (
        metrics.features.image_features(images, counting(), batch_size=batch_size).features is None
    )


def measured(samples: ImageSet, reference: ImageSet, **options: object) -> Evaluation:
    return evaluation.evaluate(samples, reference, progress=None, **{"metrics": ["fid"], **options})


def test_the_reference_is_computed_once(cache: Path) -> None:
    samples, reference = pictures(20), pictures(30, seed=1)
    first, again = counting(), counting()
    whole = measured(samples, reference, inception=first)
    assert first.network.seen == 50
    assert measured(samples, reference, inception=again).values == whole.values
    assert again.network.seen == 20
    # Features were not kept, and the kernel distance needs them: once more, and then they are
    # there.
    for seen in (50, 20):
        network = counting()
        record = measured(samples, reference, inception=network, metrics=["fid", "kid"])
        assert network.network.seen == seen
        assert record.values["fid"] == pytest.approx(whole.values["fid"], rel=1e-9)
    assert len(list(cache.iterdir())) == 2
    network = counting()
    measured(samples, reference, inception=network, cache=False)
    assert network.network.seen == 50


def test_what_features_depend_on_is_in_the_key(cache: Path) -> None:
    samples, reference = pictures(20), pictures(30, seed=1)
    changed = reference.images.clone()
    changed[0, 0, 0, 0] ^= 1
    for network, data in (
        (counting(), reference),
        (counting("two"), reference),
        (counting(), reference.take(slice(29))),
        (counting(), ImageSet(reference.name, "test", reference.images)),
        (counting(), ImageSet(reference.name, reference.split, changed)),
    ):
        measured(samples, data, inception=network)
        assert network.network.seen == 20 + len(data)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 400])
def test_a_damaged_cache_is_computed_again(cache: Path, caplog, damage: bytes) -> None:
    samples, reference = pictures(20), pictures(30, seed=1)
    expected = measured(samples, reference, inception=counting())
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    network = counting()
    assert measured(samples, reference, inception=network).values == expected.values
    assert network.network.seen == 50
    assert "damaged" in caplog.text
    assert measured(samples, reference, inception=counting()).values == expected.values


def test_a_cache_that_cannot_be_written_is_said_and_costs_nothing_else(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "file"))
    assert measured(pictures(20), pictures(30, seed=1), inception=counting()).values["fid"] > 0
    assert "could not be cached" in caplog.text


# --- the whole


def test_the_measures_are_those_of_the_parts() -> None:
    samples, reference = pictures(60), pictures(80, seed=1)
    network = counting(head=True)
    names = ["fid", "kid", "precision-recall", "is", "diversity"]
    record = measured(samples, reference, inception=network, metrics=names, seed=3)
    ours, theirs = (Counting()(prepared(images.images)) for images in (samples, reference))
    assert list(record.values) == names
    assert record.values["fid"] == pytest.approx(metrics.frechet_distance(ours, theirs), rel=1e-6)
    assert record.values["kid"]["mean"] == pytest.approx(
        metrics.kernel_distance(ours, theirs, seed=3).mean, rel=1e-4
    )
    pair = metrics.precision_recall(ours, theirs)
    assert record.values["precision-recall"] == {"precision": pair.precision, "recall": pair.recall}
    order = torch.randperm(60, generator=seeded(3, "order"))
    score = metrics.inception_score(network.probabilities(ours)[order])
    assert record.values["is"]["mean"] == pytest.approx(score.mean, rel=1e-5)
    other = metrics.diversity(random_subset(reference, 60, 3).images)
    assert record.values["diversity"]["reference"]["distance"] == pytest.approx(other.distance)
    expected = metrics.diversity(samples.images).distance / other.distance
    assert record.values["diversity"]["ratio"] == pytest.approx(expected)
    assert (record.samples.count, record.reference.count, record.seed, record.open) == (
        60,
        80,
        3,
        {},
    )
    assert record.inception == {"file": "counting.pt", "sha256": "one", "head": True}
    assert "TensorFlow 1" in record.resize


def test_the_frechet_distance_of_images_with_known_moments() -> None:
    # Uniform grey g: every feature is (g - 128) / 128, so the distance is 12 [(mean - mean')^2 +
    # (std - std')^2].
    levels = [
        torch.tensor(values, dtype=torch.uint8)
        for values in ([100, 140, 60, 180], [80, 100, 60, 120])
    ]
    sets = [image_set(grey[:, None, None, None].expand(4, 3, 8, 8), "grey") for grey in levels]
    first, second = (grey.double() / 128 for grey in levels)
    expected = 12 * ((first.mean() - second.mean()) ** 2 + (first.std() - second.std()) ** 2).item()
    assert measured(*sets, inception=counting()).values["fid"] == pytest.approx(expected, rel=1e-5)


def test_with_groups_the_distance_is_also_that_without_each_of_them() -> None:
    samples, reference = pictures(20), pictures(30, seed=1)
    record = measured(
        samples, reference, inception=counting(), metrics=["fid", "precision-recall"], groups=3
    )
    whole = measured(samples, reference, inception=counting(), metrics=["fid", "precision-recall"])
    assert whole.left_out == {}
    assert record.values["fid"] == pytest.approx(whole.values["fid"], rel=1e-9)
    assert record.values["precision-recall"] == whole.values["precision-recall"]
    for left_out, start, stop in zip(record.left_out["fid"], (0, 7, 14), (7, 14, 20), strict=True):
        rest = samples.take(torch.tensor([i for i in range(20) if not start <= i < stop]))
        alone = measured(rest, reference, inception=counting()).values["fid"]
        assert left_out == pytest.approx(alone, rel=1e-9)


def test_the_jackknife_of_a_mean_is_its_interval() -> None:
    values = torch.randn(7, generator=seeded(0), dtype=torch.float64)
    left_out = [(values.sum() - value).item() / 6 for value in values]
    # Student's t of six degrees of freedom.
    assert metrics.jackknife_interval(left_out) == pytest.approx(
        2.446912 * values.std().item() / 7**0.5, rel=1e-5
    )
    assert math.isnan(metrics.jackknife_interval([1.0]))


def test_without_a_head_the_inception_score_is_left_open() -> None:
    record = measured(pictures(20), pictures(30), inception=counting(), metrics=["is", "fid"])
    assert list(record.values) == ["fid"]
    assert "counting.pt has no classification head; give the public file" in record.open["is"]
    alone = measured(pictures(20), pictures(30), inception=counting(), metrics=["is"])
    assert (alone.values, list(alone.open)) == ({}, ["is"])


def test_classes_are_counted_by_a_classifier() -> None:
    model = load("mnist-classifier")
    samples, reference = (pictures(count, seed=count, size=28, channels=1) for count in (7, 9))
    record = measured(samples, reference, metrics=["classes"], classifier=model).values["classes"]
    labels = [
        model.network((images.images.float() + 0.5) / 256).argmax(1)
        for images in (samples, reference)
    ]
    shares = [torch.bincount(one, minlength=10) / len(one) for one in labels]
    assert record["samples"] == pytest.approx(shares[0].tolist())
    assert record["reference"] == pytest.approx(shares[1].tolist())
    assert record["distance"] == pytest.approx(0.5 * (shares[0] - shares[1]).abs().sum().item())
    assert record["names"] == list("0123456789")


def test_a_subset_is_random_seeded_and_in_order() -> None:
    images = ImageSet("some", "samples", torch.arange(100, dtype=torch.uint8)[:, None, None, None])
    picked = random_subset(images, 10, 0).images.flatten().tolist()
    assert len(set(picked)) == 10
    assert picked == sorted(picked) != list(range(10))
    assert picked == random_subset(images, 10, 0).images.flatten().tolist()
    assert picked != random_subset(images, 10, 1).images.flatten().tolist()
    assert random_subset(images, 100, 0) is random_subset(images, None, 0) is images
    record = measured(pictures(50), pictures(20, seed=1), inception=counting(), limit=10, seed=4)
    assert (record.samples.count, record.samples.available) == (10, 50)
    same = measured(random_subset(pictures(50), 10, 4), pictures(20, seed=1), inception=counting())
    assert same.values == record.values


def test_what_cannot_be_compared_is_refused_before_any_work() -> None:
    network, some = counting(), pictures(20)
    digits, others = load("mnist-classifier"), load("mnist")
    several = {"metrics": ["fid", "precision-recall"]}
    cases: list[tuple[str, ImageSet, ImageSet, dict[str, object]]] = [
        ("reference some hold 1 images; expected at least 2", some, pictures(1), {}),
        ("samples some hold 1 images; expected at least 2", pictures(1), some, {}),
        ("at least 4 for precision-recall", pictures(3), some, several),
        ("3x12x12 .*3x8x8", some, pictures(20, size=8), {}),
        ("0 to 1 of 255", ImageSet("binary", "samples", some.images // 128), some, {}),
        ("'fed'.*choose some of fid", some, some, {"metrics": ["fed"]}),
        ("at least one metric", some, some, {"metrics": []}),
        ("--classifier", some, some, {"metrics": ["classes"]}),
        ("1x28x28", some, some, {"metrics": ["classes"], "classifier": digits}),
        ("'energy'", some, some, {"metrics": ["classes"], "classifier": others}),
        ("groups .* 11 of 20 samples", some, some, {"groups": 11}),
    ]
    for match, samples, reference, options in cases:
        with pytest.raises(UsageError, match=match):
            measured(samples, reference, inception=network, **options)
    assert network.network.seen == 0


def test_features_that_are_not_finite_are_refused() -> None:
    class Broken(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    with pytest.raises(UsageError, match=r"broken\.pt.*not finite"):
        measured(pictures(4), pictures(4), inception=Inception("broken.pt", "", Broken()))


# --- images to be judged


def test_arrays_of_every_public_form_give_the_same_images(tmp_path: Path) -> None:
    images = pictures(4).images.numpy()
    forms = {
        "x": images / np.float32(255),
        "midpoints": None,
        "arr_0": images.transpose(0, 2, 3, 1),
        "images": images,
    }
    for name, array in forms.items():
        content = {"x": (images + 0.5) / 256} if name == "midpoints" else {name: array}
        np.savez(tmp_path / "samples.npz", labels=np.zeros(4), **content)
        loaded = load_samples(tmp_path / "samples.npz")
        assert np.array_equal(loaded.images.numpy(), images), name
        assert (loaded.name, loaded.split) == ("samples", "samples")


def test_a_folder_and_a_zip_are_taken_whole_and_a_split_of_a_folder_in_part(tmp_path: Path) -> None:
    images = pictures(25).images
    folder = save_pictures(tmp_path / "faces", images)
    assert torch.equal(load_samples(folder).images, images)
    assert len(load_samples(f"{folder}:train")) == 23
    assert load_samples(f"{folder}:test").split == "test"
    assert load_samples(folder, size=6).shape == (3, 6, 6)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.full((2, 3, 4, 4), np.nan), "not finite, in 2 images"),
        (np.linspace(-1, 1, 96).reshape(2, 3, 4, 4), r"-1 to 1; .* must lie in \[0, 1\]"),
        (np.zeros((2, 5, 4, 4)), "1 or 3 channels"),
        (np.array([{}], dtype=object), "not an .npz of arrays"),
        (None, "array x or arr_0, got a, b"),
    ],
)
def test_arrays_that_are_no_images_are_refused(
    tmp_path: Path, array: np.ndarray | None, match: str
) -> None:
    zeros = np.zeros((2, 3, 4, 4))
    np.savez(
        tmp_path / "samples.npz", **({"a": zeros, "b": zeros} if array is None else {"x": array})
    )
    with pytest.raises(UsageError, match=match):
        load_samples(tmp_path / "samples.npz")


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK no zip")
    for source, match in (
        ("cifar10", "cifar10:test"),
        ("nothing.npz", "'nothing.npz'"),
        ("cifar11:test", "'cifar10'"),
        (str(tmp_path / "broken.npz"), "not an .npz of arrays"),
    ):
        with pytest.raises(UsageError, match=match):
            load_samples(source)


# --- records


def test_a_record_survives_json_and_other_files_are_refused(tmp_path: Path) -> None:
    evaluated = measured(pictures(20), pictures(30), inception=counting(), metrics=["fid", "is"])
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"evaluations": [evaluated.to_json()]}))
    assert read_evaluations(file) == [evaluated]
    assert evaluated.environment["torch"] == torch.__version__
    for content, match in (
        ({}, "no evaluations"),
        ({"evaluations": [{}]}, "not an evaluation of mmdgs, format 1"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=match):
            read_evaluations(file)


def test_different_counts_and_references_are_not_compared() -> None:
    network = counting()
    first = measured(pictures(20), pictures(30), inception=network)
    fewer = measured(pictures(19), pictures(30), inception=network)
    other = measured(pictures(20), pictures(30, seed=9), inception=network)
    pixels = measured(pictures(20, seed=3), pictures(30), metrics=["diversity"])
    check_comparable([first, first, pixels])
    with pytest.raises(UsageError, match=r"some: 20; some: 19.*--limit.*--force"):
        check_comparable([first, first, fewer])
    with pytest.raises(UsageError, match="different reference images"):
        check_comparable([first, other])
    check_comparable([first, fewer, other], force=True)


# --- the command line


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sets of samples, a reference and a fake network."""
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("a", 20, 0), ("b", 25, 1), ("data", 30, 2)):
        np.savez(tmp_path / f"{name}.npz", arr_0=pictures(count, seed=seed).images.numpy())
    fake_script(tmp_path / "fake.pt")
    return tmp_path


def said(result) -> str:
    return " ".join(result.output.split())


COMMAND = ["--reference", "data.npz", "--inception", "fake.pt", "--device", "cpu"]


def command(words: str, status: int = 0) -> str:
    """What `mmdgs evaluate` says that ends with this status; the fake network is given."""
    result = run(cli.app, ["evaluate", *words.split(), *COMMAND])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return said(result)


@pytest.mark.usefixtures("files")
def test_a_table_of_all_metrics_with_the_open_cell_and_the_warnings() -> None:
    table = command("a.npz --metrics fid,kid,precision-recall,is,diversity")
    names = ("against data:samples (30 images)", "KID x 1000", "precision", "recall", "duplicates")
    assert all(name in table for name in names)
    assert "│ Inception score │ open │" in table.replace("  ", " ")
    assert "the metric 'is' is left open: fake.pt has no classification head" in table
    assert "20 samples are few" in table
    assert "±" not in table.split("FID")[1].split("KID")[0]
    table = command("a.npz --metrics fid,kid --groups 4")
    assert "±" in table.split("FID")[1].split("KID")[0]
    assert re.search(r"FID of 50,000, extrapolated +│ +-?[\d.]+ ± [\d.]+ │", table)


def test_the_record_holds_what_numbers_depend_on(files: Path) -> None:
    words = "evaluate b.npz --limit 20 --seed 5 --out r.json --json".split()  # noqa: SIM905
    result = run(cli.app, [*words, *COMMAND])
    assert result.exit_code == 0, result.output
    (record,) = read_evaluations(files / "r.json")
    assert json.loads(result.stdout) == json.loads((files / "r.json").read_text())
    counts = record.samples.count, record.samples.available
    assert (*counts, record.samples.split) == (20, 25, "samples")
    assert (record.seed, record.reference.name, record.inception["file"]) == (5, "data", "fake.pt")
    ours = random_subset(load_samples("b.npz"), 20, 5)
    expected = measured(ours, load_samples("data.npz"), inception=metrics.load_inception("fake.pt"))
    assert record.values["fid"] == pytest.approx(expected.values["fid"], rel=1e-9)
    assert "--overwrite" in command("a.npz --out r.json", status=2)
