"""CelebA from its aligned images (Liu et al., 2015), cropped as by Song and Ermon (2020, NCSNv2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from mmdgs.data.folders import Reading, open_gallery, read_images
from mmdgs.data.imageset import ImageSet
from mmdgs.data.sources import ENVIRONMENT, check_split, data_folder
from mmdgs.errors import UsageError
from mmdgs.files import read_file
from mmdgs.reading import FREE

SPLITS = {"train": "0", "valid": "1", "test": "2"}
PARTITION = "list_eval_partition.txt"
IMAGES = ("img_align_celeba", "img_align_celeba.zip")
CROP = 140  # of 178 x 218 pixels
SIZE = 64
FOLDERS = ("celeba", "CelebA", "")
# The public drive keeps the parts of the set in folders of their own.
INNER = ("", "Img", "Eval")
WEBSITE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"


def load_celeba(split: str, data_dir: Path | str | None, reading: Reading) -> ImageSet:
    """The training, validation or test part of CelebA: the central 140 x 140 pixels, resized to 64 unless told."""
    check_split("celeba", split, tuple(SPLITS))
    root = data_folder(data_dir)
    images, partition = _find(root, IMAGES), _find(root, (PARTITION,))
    if images is None:
        raise _absent(root, f"neither {IMAGES[0]}/ nor {IMAGES[1]} was found in {root}")
    if partition is None:
        raise _absent(root, f"{images} is there but {PARTITION}, which says what is for training and testing, is not")
    fit = replace(reading.fit, size=reading.fit.size or SIZE, crop=CROP)
    listed = _listed(partition, SPLITS[split])
    with open_gallery(images) as gallery:
        where = {PurePosixPath(name).name: name for name in gallery.names}
        pictures = read_images(gallery, [where.get(name, name) for name in listed], replace(reading, fit=fit))
    return ImageSet("celeba", split, pictures.images, skipped=pictures.skipped)


def _find(root: Path, names: tuple[str, ...]) -> Path | None:
    places = (root / outer / inner / name for outer in FOLDERS for inner in INNER for name in names)
    return next((place for place in places if place.exists()), None)


def _absent(root: Path, what: str) -> UsageError:
    return UsageError(
        f"{what}; CelebA cannot be downloaded without agreeing to its terms: get {IMAGES[1]} and {PARTITION} from "
        f"{WEBSITE} and put them in {root / FOLDERS[0]}, or name the folder that holds them with --data-dir or the "
        f"environment variable {ENVIRONMENT}"
    )


def _listed(partition: Path, number: str) -> list[str]:
    """The files of one part, from lines such as "000001.jpg 0"."""
    listed = []
    for count, line in enumerate(read_file(partition, FREE).decode("latin1").splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in SPLITS.values():
            raise UsageError(f"{partition}, line {count}: expected a file and 0, 1 or 2, got {line[:80]!r}")
        if words[1] == number:
            listed.append(words[0])
    if not listed:
        raise UsageError(f"{partition} lists no image of part {number}")
    return listed
