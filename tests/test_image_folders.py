"""Folders and zips of images, and CelebA."""

from __future__ import annotations

import io
import logging
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmdgs.data import load_images
from mmdgs.errors import UsageError

FACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "celeba" / "faces64.zip"


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def plain(level: int, size: tuple[int, int] = (4, 4), mode: str = "L", kind: str = "PNG") -> bytes:
    """An image of one level, as bytes of a file."""
    return encoded(Image.new(mode, size, level if mode == "L" else (level,) * len(mode)), kind)


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    """A folder, or a zip if its name says so."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def levels(path: Path, split: str = "train", **options) -> list[int]:
    """The level of each image, all being plain."""
    return load_images(str(path), split, **options).images[:, 0, 0, 0].tolist()


def refused(*parts: object):
    return pytest.raises(UsageError, match=".*".join(re.escape(str(part)) for part in parts))


places = pytest.mark.parametrize("place", ["holiday", "holiday.zip"])


# --- which images


@places
def test_every_twentieth_image_is_held_out(tmp_path: Path, place: str) -> None:
    path = write(tmp_path / place, {f"{i:03}.png": plain(i) for i in reversed(range(45))})
    held = [0, 20, 40]
    assert levels(path, "test") == levels(path, "valid") == held
    assert levels(path, "train") == [i for i in range(45) if i not in held]
    images = load_images(str(path))
    assert (images.name, images.shape, images.labels) == ("holiday", (1, 4, 4), None)


@places
@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_for_the_parts(tmp_path: Path, place: str, held: str) -> None:
    names = ("preview.png", "train/a.png", "train/b.png", f"{held}/c.png")
    path = write(tmp_path / place, {name: plain(i) for i, name in enumerate(names)})
    assert levels(path, "train") == [1, 2]
    assert levels(path, "test") == levels(path, "valid") == [3]


@places
def test_subfolders_are_classes(tmp_path: Path, place: str) -> None:
    files = {f"{kind}/{i:02}.png": plain(i) for i in range(12) for kind in ("cat", "dog")}
    path = str(write(tmp_path / place, files))
    train, test = (load_images(path, split) for split in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog")
    assert test.labels.tolist() == [0, 1]
    assert train.labels.tolist() == [0] * 11 + [1] * 11
    assert train.labels.dtype == torch.int64
    assert train.names[10:12] == ("cat/11.png", "dog/00.png")


def test_images_at_different_depths_have_no_labels(tmp_path: Path) -> None:
    files = {"cat/a.png": plain(1), "dog/b.png": plain(2), "c.png": plain(3)}
    images = load_images(str(write(tmp_path / "zoo", files)))
    assert (images.labels, images.classes) == (None, ())


def test_a_folder_that_holds_all_the_rest_is_looked_through(tmp_path: Path) -> None:
    files = {f"zoo/all/{kind}/{i}.png": plain(i) for kind in ("cat", "dog") for i in range(2)}
    images = load_images(str(write(tmp_path / "zoo.zip", files)))
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0, 1, 1]
    path = write(tmp_path / "flat.zip", {f"flat/{i}.png": plain(i) for i in range(3)})
    assert load_images(str(path)).labels is None


def test_all_formats_are_read_and_other_files_left_alone(tmp_path: Path) -> None:
    ends = ("png", "JPG", "jpeg", "webp", "bmp", "gif", "tif", "ppm")
    kinds = {"JPG": "JPEG", "tif": "TIFF"}
    files = {
        f"{i}.{end}": plain(10 * i, (8, 8), "RGB", kinds.get(end, end.upper()))
        for i, end in enumerate(ends)
    }
    others = ("notes.txt", ".hidden.png", "__MACOSX/._0.png", "._1.png", "2.npy")
    path = write(tmp_path / "kinds", {**files, **dict.fromkeys(others, b"x")})
    images = load_images(str(path))
    assert len(images) == 7
    for image, level in zip(images.images, range(10, 80, 10), strict=True):
        assert (image.int() - level).abs().max() <= 2  # JPEG and WebP are not exact


def test_a_limit_keeps_the_first_and_decodes_no_other(tmp_path: Path) -> None:
    files = {f"{i:02}.png": plain(i) if i < 12 else b"broken" for i in range(20)}
    path = write(tmp_path / "many", files)
    assert levels(path, limit=11) == list(range(1, 12))
    with refused("12.png"):
        load_images(str(path), limit=12)
    assert levels(path, limit=2) == [1, 2]
    assert levels(path, "test", limit=5) == [0]


@pytest.mark.skipif(not FACES.exists(), reason=f"there are no faces at {FACES}")
def test_faces_from_a_zip() -> None:
    faces = load_images(str(FACES), limit=50)
    assert (faces.name, len(faces), faces.shape, faces.labels) == ("faces64", 50, (3, 64, 64), None)
    with zipfile.ZipFile(FACES) as archive, archive.open(sorted(archive.namelist())[1]) as stream:
        expected = np.asarray(Image.open(stream))
    assert np.array_equal(faces.images[0].permute(1, 2, 0).numpy(), expected)
    small = load_images(str(FACES), limit=3, size=16, channels=1)
    assert small.shape == (1, 16, 16)
    means = [x[:3].double().mean((1, 2, 3)) for x in (small.images, faces.images)]
    # Grey weighs the colours otherwise.
    torch.testing.assert_close(means[0], means[1], atol=15, rtol=0)


# --- what becomes of an image


def pair(tmp_path: Path, content: bytes, **options) -> np.ndarray:
    """What one file becomes: the training part of two, of which the first is held out."""
    path = write(tmp_path / "pair", {"0.png": content, "1.png": content})
    return load_images(str(path), **options).images[0].numpy()


def test_pixels_are_in_their_places(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    out = pair(tmp_path, encoded(Image.fromarray(pixels)))
    assert np.array_equal(out, pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(30, 20), (20, 30)])
def test_the_centre_is_cropped_and_resized(tmp_path: Path, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "red")
    left, top = (size[0] - 20) // 2, (size[1] - 20) // 2
    image.paste((10, 20, 30), (left, top, left + 20, top + 20))
    out = pair(tmp_path, encoded(image), size=8)
    assert out.shape == (3, 8, 8)
    assert out.reshape(3, -1).min(1).tolist() == out.reshape(3, -1).max(1).tolist() == [10, 20, 30]


def test_the_first_image_decides_on_colour(tmp_path: Path) -> None:
    red = encoded(Image.new("RGB", (4, 4), (255, 0, 0)))
    path = write(tmp_path / "grey first", {"0.png": red, "1.png": plain(9), "2.png": red})
    assert load_images(str(path)).images[:, :, 0, 0].tolist() == [[9], [76]]
    path = write(tmp_path / "red first", {"0.png": plain(9), "1.png": red, "2.png": plain(9)})
    assert load_images(str(path)).images[:, :, 0, 0].tolist() == [[255, 0, 0], [9, 9, 9]]
    assert load_images(str(path), channels=1).images[:, :, 0, 0].tolist() == [[76], [9]]


def test_cameras_that_were_turned(tmp_path: Path) -> None:
    image = Image.new("L", (6, 4), 0)
    image.paste(255, (0, 0, 6, 1))  # a white line at the top
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by 90 degrees to see it upright
    out = pair(tmp_path, encoded(image, exif=exif))
    assert out.shape == (1, 6, 4)
    assert out[0, :, -1].tolist() == [255] * 6


def test_transparency_shows_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (200, 0, 0, 0))
    assert pair(tmp_path, encoded(image))[:, 0].T.tolist() == [[10, 20, 30], [255, 255, 255]]


# --- what cannot be used

NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
TRUNCATED = encoded(Image.fromarray(NOISE))[:2000]
UNREADABLE = {
    "no image": (b"<html>", "not an image"),
    "truncated": (TRUNCATED, "truncated"),
    "numbers of 32 bits": (encoded(Image.new("I", (4, 4), 5), "TIFF"), "32 bits"),
    "floating point": (encoded(Image.new("F", (4, 4), 2.5), "TIFF"), "2.5"),
}


@places
@pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_images(tmp_path: Path, place: str, case: tuple[bytes, str], caplog) -> None:
    content, reason = case
    files = {"0.png": plain(0), "1.png": plain(1), "2.png": content, "3.png": plain(3)}
    path = write(tmp_path / place, files)
    with refused("2.png", reason, "--unreadable skip"):
        load_images(str(path))
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        images = load_images(str(path), unreadable="skip")
    assert images.skipped == ("2.png",)
    assert images.images[:, 0, 0, 0].tolist() == [1, 3]
    (message,) = caplog.messages
    assert reason in message
    assert "2.png" in message


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_decompression_bombs(tmp_path: Path, action: str, monkeypatch) -> None:
    path = write(tmp_path / "bombs", {"0.png": plain(0, (10, 10)), "1.png": plain(0, (20, 20))})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with refused("1.png", "bomb"):
            load_images(str(path))
        assert len(load_images(str(path), "test")) == 1


def test_images_of_different_sizes(tmp_path: Path) -> None:
    files = {"0.png": plain(0), "1.png": plain(1, (6, 4)), "2.png": plain(2, (4, 6))}
    path = write(tmp_path / "sizes", files)
    with refused("1.png is 6 x 4", "--size"):
        load_images(str(path))
    assert levels(path, size=4) == [1, 2]


def test_damaged_zips(tmp_path: Path) -> None:
    path = write(tmp_path / "images.zip", {"0.png": plain(0), "1.png": plain(1)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with refused(path, "damaged"):
        load_images(str(path))
    position = whole.rindex(plain(1)) + 50
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    with refused("cannot read the image 1.png", "Bad CRC-32"):
        load_images(str(path))


# --- CelebA


def face(level: int) -> bytes:
    """178 x 218 pixels, white outside of the central 140 x 140."""
    image = Image.new("RGB", (178, 218), "white")
    image.paste((level,) * 3, (19, 39, 159, 179))
    return encoded(image)


FILES = {f"{i:06}.png": face(20 * i) for i in range(1, 6)}
PARTITION = "000001.png 0\n000002.png 2\n000003.png 1\n000004.png 0\n000005.png 0\n"


def celeba(root: Path, images: str = "img_align_celeba", partition: str | None = PARTITION) -> Path:
    (root / images).parent.mkdir(parents=True, exist_ok=True)
    write(root / images, FILES)
    if partition is not None:
        (root / "list_eval_partition.txt").write_text(partition)
    return root


@pytest.mark.parametrize("images", ["img_align_celeba", "img_align_celeba.zip"])
def test_celeba(tmp_path: Path, images: str) -> None:
    celeba(tmp_path / "celeba", images)
    for split, expected in (("train", [20, 80, 100]), ("valid", [60]), ("test", [40])):
        faces = load_images("celeba", split, data_dir=tmp_path)
        assert (faces.name, faces.split, faces.shape) == ("celeba", split, (3, 64, 64))
        # The whole of the crop is of the face's level: nothing of the white around it.
        assert faces.images.amin((1, 2, 3)).tolist() == expected
        assert faces.images.amax((1, 2, 3)).tolist() == expected
    few = load_images("celeba", data_dir=tmp_path / "celeba", size=32, channels=1, limit=2)
    assert (len(few), few.shape) == (2, (1, 32, 32))


def test_celeba_that_is_not_there(tmp_path: Path) -> None:
    with refused("img_align_celeba.zip", "https://", "--data-dir"):
        load_images("celeba", data_dir=tmp_path)


def test_bad_partitions_of_celeba(tmp_path: Path) -> None:
    celeba(tmp_path, partition="000001.png 0\n000002.png 3\n")
    with refused("list_eval_partition.txt, line 2"):
        load_images("celeba", data_dir=tmp_path)
    for images in ("img_align_celeba.zip", "img_align_celeba"):
        root = celeba(tmp_path / images, images, partition="000001.png 0\n000009.png 0\n")
        with refused("cannot read the image 000009.png", "o such file"):
            load_images("celeba", data_dir=root)
        assert load_images("celeba", data_dir=root, unreadable="skip").skipped == ("000009.png",)
