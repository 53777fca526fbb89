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

from mmdgs.data import folders, load_images
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


# --- which images -----------------------------------------------------------------------------------------------


@places
def test_every_twentieth_image_is_held_out(tmp_path: Path, place: str) -> None:
    path = write(tmp_path / place, {f"{i:03}.png": plain(i) for i in reversed(range(45))})
    held = [0, 20, 40]
    assert levels(path, "test") == levels(path, "valid") == held
    assert levels(path, "train") == [i for i in range(45) if i not in held]
    found = load_images(str(path))
    assert (found.name, found.split, found.shape, found.labels) == ("holiday", "train", (1, 4, 4), None)


def test_two_images_are_enough_and_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "two", {"a.png": plain(1), "b.png": plain(2)})
    assert (levels(path, "test"), levels(path, "train")) == ([1], [2])
    path = write(tmp_path / "one", {"a.png": plain(1)})
    with refused(path, "holds 1 image and none is left for the split 'train'; expected at least 2"):
        load_images(str(path))


@places
@pytest.mark.parametrize("held", ["test", "valid", "val"])
def test_folders_for_the_parts(tmp_path: Path, place: str, held: str) -> None:
    files = {"train/b.png": plain(2), "train/a.png": plain(1), f"{held}/c.png": plain(3), "preview.png": plain(4)}
    path = write(tmp_path / place, files)
    assert levels(path, "train") == [1, 2]
    assert levels(path, "test") == levels(path, "valid") == [3]


def test_test_and_valid_where_both_are_there(tmp_path: Path) -> None:
    files = {f"{part}/a.png": plain(i) for i, part in enumerate(["train", "val", "test"])}
    path = write(tmp_path / "three", files)
    assert [levels(path, part) for part in ("train", "valid", "test")] == [[0], [1], [2]]


@places
def test_subfolders_are_classes(tmp_path: Path, place: str) -> None:
    files = {f"{kind}/{i:02}.png": plain(100 * k + i) for k, kind in enumerate(["cat", "dog"]) for i in range(12)}
    train, test = (load_images(str(write(tmp_path / place, files)), split) for split in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog")
    assert test.labels.tolist() == [0, 1]
    assert torch.equal(train.labels, (train.images[:, 0, 0, 0] >= 100).long())
    assert train.labels.dtype == torch.int64


def test_a_label_means_the_same_in_all_parts(tmp_path: Path) -> None:
    files = {f"train/{kind}/a.png": plain(i) for i, kind in enumerate(["cat", "dog", "emu"])}
    test = load_images(str(write(tmp_path / "zoo", {**files, "test/dog/a.png": plain(9)})), "test")
    assert test.classes == ("cat", "dog", "emu")
    assert test.labels.tolist() == [1]


def test_images_at_different_depths_have_no_labels(tmp_path: Path) -> None:
    files = {"cat/a.png": plain(1), "dog/b.png": plain(2), "c.png": plain(3)}
    found = load_images(str(write(tmp_path / "zoo", files)))
    assert (found.labels, found.classes) == (None, ())
    files = {"cat/a.png": plain(1), "dog/b/c.png": plain(2), "emu/d.png": plain(3)}
    assert load_images(str(write(tmp_path / "deep", files))).labels is None


def test_a_folder_that_holds_all_the_rest_is_looked_through(tmp_path: Path) -> None:
    files = {f"zoo/all/{kind}/{i}.png": plain(i) for kind in ("cat", "dog") for i in range(2)}
    found = load_images(str(write(tmp_path / "zoo.zip", files)))
    assert found.classes == ("cat", "dog")
    assert found.labels.tolist() == [0, 1, 1]
    assert load_images(str(write(tmp_path / "flat.zip", {f"flat/{i}.png": plain(i) for i in range(3)}))).labels is None


def test_all_formats_are_read_and_other_files_left_alone(tmp_path: Path) -> None:
    kinds = {"png": "PNG", "JPG": "JPEG", "jpeg": "JPEG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}
    files = {f"{i}.{end}": plain(10 * i, (8, 8), "RGB", kind) for i, (end, kind) in enumerate(kinds.items())}
    files["7.ppm"] = plain(70, (8, 8), "RGB", "PPM")
    others = {"notes.txt": b"x", ".hidden.png": b"x", "__MACOSX/._0.png": b"x", "._1.png": b"x", "2.npy": b"x"}
    path = write(tmp_path / "kinds", {**files, **others})
    found = load_images(str(path))
    assert len(found) == 7
    for image, level in zip(found.images, range(10, 80, 10), strict=True):
        assert (image.int() - level).abs().max() <= 2  # JPEG and WebP are not exact


def test_a_limit_keeps_the_first_and_decodes_no_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "BLOCK", 4)
    files = {f"{i:02}.png": plain(i) if i < 12 else b"broken" for i in range(20)}
    path = write(tmp_path / "many", files)
    decoded: list[bytes] = []
    decode = folders.decode
    monkeypatch.setattr(folders, "decode", lambda content, fit: (decoded.append(content), decode(content, fit))[1])
    assert levels(path, limit=11) == list(range(1, 12))
    assert sorted(decoded) == sorted(files[f"{i:02}.png"] for i in range(1, 12))
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
    torch.testing.assert_close(means[0], means[1], atol=15, rtol=0)  # grey weighs the colours otherwise


# --- what becomes of an image -----------------------------------------------------------------------------------


def pair(tmp_path: Path, content: bytes, **options) -> np.ndarray:
    """What one file becomes: the training part of two, of which the first is held out."""
    path = write(tmp_path / "pair", {"0.png": content, "1.png": content})
    return load_images(str(path), **options).images[0].numpy()


def test_pixels_are_in_their_places(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    assert np.array_equal(pair(tmp_path, encoded(Image.fromarray(pixels))), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(30, 20), (20, 30), (20, 20)], ids=["wide", "tall", "square"])
def test_the_centre_is_cropped_and_resized(tmp_path: Path, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "red")
    left, top = (size[0] - 20) // 2, (size[1] - 20) // 2
    image.paste((10, 20, 30), (left, top, left + 20, top + 20))
    out = pair(tmp_path, encoded(image), size=8)
    assert out.shape == (3, 8, 8)
    assert out.reshape(3, -1).min(1).tolist() == out.reshape(3, -1).max(1).tolist() == [10, 20, 30]


def test_resizing_averages_what_it_drops(tmp_path: Path) -> None:
    board = np.indices((64, 64)).sum(0) % 2 * 255
    out = pair(tmp_path, encoded(Image.fromarray(board.astype(np.uint8))), size=8)
    assert np.abs(out[0, 1:-1, 1:-1].astype(int) - 127.5).max() < 3  # one pixel of eight by eight would be 0 or 255


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
    palette = image.quantize(4)
    assert pair(tmp_path, encoded(palette))[:, 0, 1].tolist() == [255, 255, 255]


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 255, 256, 65535]], dtype=np.uint16))
    assert pair(tmp_path, encoded(image)).tolist() == [[[0, 0, 1, 255]]]


# --- what cannot be used ----------------------------------------------------------------------------------------

TRUNCATED = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)))[:2000]
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
UNREADABLE = {
    "no image": (b"<html>", "not an image of the formats PNG, JPEG"),
    "empty": (b"", "not an image of the formats"),
    "truncated": (TRUNCATED, "truncated"),
    "a program for a printer": (EPS, "not an image of the formats"),
    "numbers of 32 bits": (encoded(Image.new("I", (4, 4), 5), "TIFF"), "its pixels are stored in 32 bits"),
    "floating point": (encoded(Image.new("F", (4, 4), 2.5), "TIFF"), "lie between 2.5 and 2.5, expected 0 to 1"),
}


@places
@pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_images(tmp_path: Path, place: str, case: tuple[bytes, str], caplog) -> None:
    content, reason = case
    files = {"0.png": plain(0), "1.png": plain(1), "2.png": content, "3.png": plain(3)}
    path = write(tmp_path / place, files)
    with refused("cannot read the image 2.png in", path, reason, "--unreadable skip"):
        load_images(str(path))
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        found = load_images(str(path), unreadable="skip")
    assert found.skipped == ("2.png",)
    assert found.images[:, 0, 0, 0].tolist() == [1, 3]
    assert [record.name for record in caplog.records] == ["mmdgs"]
    assert reason in caplog.text
    assert "2.png" in caplog.text


def test_labels_and_limits_step_over_what_is_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "BLOCK", 2)
    files = {f"cat/{i}.png": plain(i) for i in range(4)} | {f"dog/{i}.png": plain(10 + i) for i in range(4)}
    files |= {"cat/1.png": b"", "cat/3.png": b"", "dog/2.png": b""}
    path = write(tmp_path / "zoo", files)
    found = load_images(str(path), unreadable="skip", limit=3)
    assert found.images[:, 0, 0, 0].tolist() == [2, 10, 11]
    assert found.labels.tolist() == [0, 1, 1]
    assert found.skipped == ("cat/1.png", "cat/3.png")
    assert load_images(str(path), unreadable="skip").skipped == ("cat/1.png", "cat/3.png", "dog/2.png")


def test_nothing_that_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "broken", {"0.png": plain(1), "1.png": b"", "2.png": b""})
    with refused(path, "holds no readable image: all 2 were left out"):
        load_images(str(path), unreadable="skip")


@pytest.mark.parametrize("side", [11, 20], ids=["Pillow warns", "Pillow refuses"])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_decompression_bombs(tmp_path: Path, side: int, action: str, monkeypatch) -> None:
    path = write(tmp_path / "bombs", {"0.png": plain(0, (10, 10)), "1.png": plain(0, (side, side))})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with refused("cannot read the image 1.png", "a decompression bomb?", "limit of"):
            load_images(str(path))
        assert len(load_images(str(path), "test")) == 1


@places
def test_files_too_large_are_not_read(tmp_path: Path, place: str, monkeypatch) -> None:
    path = write(tmp_path / place, {"0.png": plain(0), "1.png": plain(1) + bytes(5000)})
    monkeypatch.setattr(folders, "LARGEST", 4000)
    with refused("1.png", "bytes, more than the limit of 4,000"):
        load_images(str(path))


def test_images_of_different_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "sizes", {"0.png": plain(0), "1.png": plain(1, (6, 4)), "2.png": plain(2, (4, 6))})
    with refused(path, "differ in size (1.png is 6 x 4, 2.png is 4 x 6)", "--size 64"):
        load_images(str(path))
    assert levels(path, size=4) == [1, 2]


def test_folders_without_images(tmp_path: Path) -> None:
    path = write(tmp_path / "empty", {"notes.txt": b"x"})
    with refused(path, "holds no images: expected files that end in .png, .jpg"):
        load_images(str(path))
    with refused("holds no images"):
        load_images(str(write(tmp_path / "empty.zip", {})))


def test_a_split_that_folders_do_not_have(tmp_path: Path) -> None:
    path = write(tmp_path / "two", {"a.png": plain(1), "b.png": plain(2)})
    with refused("unknown split 'all' of", path, "choose one of train, test, valid"):
        load_images(str(path), "all")


def test_damaged_zips(tmp_path: Path) -> None:
    path = write(tmp_path / "images.zip", {"0.png": plain(0), "1.png": plain(1)})
    whole = path.read_bytes()
    for content in (whole[:-40], b"PK\x03\x04", b"<html>", b""):
        path.write_bytes(content)
        with refused(path, "is not a zip archive, or a damaged one"):
            load_images(str(path))
    position = whole.rindex(plain(1)) + 50
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    with refused("cannot read the image 1.png", "Bad CRC-32"):
        load_images(str(path))


# --- CelebA -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("images", ["img_align_celeba", "img_align_celeba.zip", "Img/img_align_celeba.zip"])
def test_celeba(tmp_path: Path, images: str) -> None:
    celeba(tmp_path / "celeba", images)
    for split, expected in (("train", [20, 80, 100]), ("valid", [60]), ("test", [40])):
        found = load_images("celeba", split, data_dir=tmp_path)
        assert (found.name, found.split, found.shape) == ("celeba", split, (3, 64, 64))
        # The whole of the crop is of the face's level: nothing of the white around it, nothing missing.
        assert found.images.amin((1, 2, 3)).tolist() == found.images.amax((1, 2, 3)).tolist() == expected
    few = load_images("celeba", data_dir=tmp_path / "celeba", size=32, channels=1, limit=2)
    assert (len(few), few.shape) == (2, (1, 32, 32))


def test_the_whole_crop_of_celeba_is_used(tmp_path: Path) -> None:
    image = Image.new("RGB", (178, 218), "white")
    image.paste("black", (19, 39, 159, 179))
    image.paste("red", (19, 39, 20, 179))  # the first column of the crop
    write(tmp_path / "img_align_celeba", {"1.png": encoded(image)})
    (tmp_path / "list_eval_partition.txt").write_text("1.png 0\n")
    column = load_images("celeba", data_dir=tmp_path, size=140).images[0, 0, 0]
    assert column.tolist() == [255] + [0] * 139


def test_celeba_in_zips_with_a_folder_inside(tmp_path: Path) -> None:
    write(tmp_path / "img_align_celeba.zip", {f"img_align_celeba/{name}": content for name, content in FILES.items()})
    (tmp_path / "list_eval_partition.txt").write_text(PARTITION)
    assert len(load_images("celeba", data_dir=tmp_path)) == 3


def test_celeba_that_is_not_there(tmp_path: Path) -> None:
    with refused(f"nor img_align_celeba.zip was found in {tmp_path}", "https://", "--data-dir", "MMDGS_DATA"):
        load_images("celeba", data_dir=tmp_path)
    celeba(tmp_path, partition=None)
    with refused("img_align_celeba is there but list_eval_partition.txt", "is not", "--data-dir"):
        load_images("celeba", data_dir=tmp_path)


def test_bad_partitions_of_celeba(tmp_path: Path) -> None:
    celeba(tmp_path, partition="000001.png 0\n000002.png 3\n")
    with refused("list_eval_partition.txt, line 2: expected a file and 0, 1 or 2, got '000002.png 3'"):
        load_images("celeba", data_dir=tmp_path)
    celeba(tmp_path, partition="000001.png 0\n")
    with refused("list_eval_partition.txt lists no image of part 2"):
        load_images("celeba", "test", data_dir=tmp_path)
    for images in ("img_align_celeba.zip", "img_align_celeba"):
        root = celeba(tmp_path / images, images, partition="000001.png 0\n000009.png 0\n")
        with refused("cannot read the image 000009.png", "o such file"):
            load_images("celeba", data_dir=root)
        assert load_images("celeba", data_dir=root, unreadable="skip").skipped == ("000009.png",)


def test_other_images_in_the_place_of_celeba(tmp_path: Path) -> None:
    celeba(tmp_path)
    (tmp_path / "img_align_celeba" / "000001.png").write_bytes(plain(1, (64, 64)))
    with refused("000001.png", "it has 64 x 64 pixels; expected at least 140 x 140"):
        load_images("celeba", data_dir=tmp_path)
