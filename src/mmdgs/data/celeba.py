"""CelebA from its aligned images (Liu et al., 2015), cropped as by Song and Ermon (2020)."""

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
CROP, SIZE = 140, 64  # of 178 x 218 pixels
FOLDERS = ("celeba", "CelebA", "")
INNER = ("", "Img", "Eval")
"""The public drive keeps the parts of the set in folders of their own."""
WEBSITE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"


def load_celeba(split: str, data_dir: Path | str | None, reading: Reading) -> ImageSet:
    """A part of CelebA: the central 140 x 140 pixels, resized to 64 unless `reading` has a size."""
    check_split("celeba", split, tuple(SPLITS))
    root = data_folder(data_dir)
    images, partition = _find(root, IMAGES), _find(root, (PARTITION,))
    if images is None or partition is None:
        missing = f"{IMAGES[0]}/ or {IMAGES[1]}" if images is None else PARTITION
        raise UsageError(
            f"CelebA's {missing} was not found in {root}, and its terms allow no download: get "
            f"{IMAGES[1]} and {PARTITION} from {WEBSITE} and put them in {root / FOLDERS[0]}, or "
            f"name their folder with --data-dir or {ENVIRONMENT}"
        )
    listed = []
    for count, line in enumerate(read_file(partition, FREE).decode("latin1").splitlines(), start=1):
        name, _, part = line.strip().rpartition(" ")  # such as "000001.jpg 0"
        if line.strip() and (not name or part not in SPLITS.values()):
            got = f"expected a file and 0, 1 or 2, got {line[:80]!r}"
            raise UsageError(f"{partition}, line {count}: {got}")
        if part == SPLITS[split]:
            listed.append(name.strip())
    if not listed:
        raise UsageError(f"{partition} lists no image of the part {split!r}")
    fit = replace(reading.fit, size=reading.fit.size or SIZE, crop=CROP)
    with open_gallery(images) as gallery:
        stored = {PurePosixPath(name).name: name for name in gallery.names}
        names = [stored.get(name, name) for name in listed]
        faces = read_images(gallery, names, replace(reading, fit=fit))
    return replace(faces, name="celeba", split=split, names=())


def _find(root: Path, names: tuple[str, ...]) -> Path | None:
    places = (root / outer / inner / name for outer in FOLDERS for inner in INNER for name in names)
    return next((place for place in places if place.exists()), None)
