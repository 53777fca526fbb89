"""What a kill or a full disk leaves of a write, and of the next one (`make kill`: whole runs)."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kill import writes_to
from nets import tiny_model

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.files import (
    file_written_atomically,
    folder_written_atomically,
    half_written,
    output_folder,
    write_atomically,
)
from mmdgs.models import Model, conversion
from mmdgs.models.config import ModelConfig
from mmdgs.models.conversion import convert_checkpoint, export_model


class Dead(BaseException):
    """The process is dead: what it would still have done to files does not happen."""


class Kills:
    """Counts operations on files below a folder; from the k-th on none is done, no clean-up."""

    def __init__(self) -> None:
        self.folder, self.at, self.count = "", 0, 0
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple) -> None:
        if self.folder and writes_to(self.folder, event, args):
            self.count += 1
            if self.at and self.count >= self.at:
                raise Dead

    @contextlib.contextmanager
    def below(self, folder: Path, at: int = 0) -> Iterator[None]:
        self.folder, self.at, self.count = str(folder), at, 0
        try:
            with contextlib.suppress(Dead):
                yield
        finally:
            self.folder = ""


@pytest.fixture(scope="module")
def kills() -> Kills:
    return Kills()  # an audit hook stays for the life of the process, so there is one


def small(width: int = 2) -> Model:
    options = {"width": width, "depth": 1}
    return Model.build(
        ModelConfig(network="mlp", param="score", shape=(2,), options=options, sigma=0.5)
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model to export, and a checkpoint to convert whose reading takes no time."""
    folder = tmp_path / "source"
    mmdgs.save(small(), folder / "model")
    (folder / "a.pth").write_bytes(b"")
    monkeypatch.setattr(conversion, "read_ncsnv2", lambda *args, **kwargs: small())
    return folder


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda source, out: mmdgs.save(small(), out),
    "save over another": lambda source, out: mmdgs.save(small(), out),
    "save in shards": lambda source, out: small(64).save_pretrained(out, shard_mb=0.02),
    "export": lambda source, out: export_model(source / "model", out, overwrite=True),
    "export over another": lambda source, out: export_model(source / "model", out, overwrite=True),
    "convert": lambda source, out: convert_checkpoint(source / "a.pth", out, overwrite=True),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def started(name: str, place: Path) -> Path:
    """A folder to write into, with an older model where one is replaced; `note` is not ours."""
    out = place / "deep" / "out"
    if "over" in name:
        mmdgs.save(small(3), out)
    if name == "save over another":
        (out / "note").write_bytes(b"mine")
    return out


@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_at_any_operation_leaves_a_whole_model_or_none_and_the_next_write_nothing_else(
    name: str, source: Path, tmp_path: Path, kills: Kills
) -> None:
    write, place = WRITERS[name], tmp_path / "whole"
    out = started(name, place)
    before = contents(out) if out.exists() else None
    with kills.below(place):
        write(source, out)
    operations, whole = kills.count, contents(place)
    assert operations > 5
    for at in range(1, operations + 1):
        place = tmp_path / str(at)
        out = started(name, place)
        with kills.below(place, at):
            write(source, out)
        # Into a folder with other files they are moved one after the other.
        if name != "save over another" and out.exists():
            assert contents(out) in (before, contents(tmp_path / "whole" / "deep" / "out")), at
        write(source, out)
        assert contents(place) == whole, f"operation {at} of {operations}"
        assert not [*place.rglob(".*")], at


def test_what_is_called_a_model_beside_other_files_is_whole(tmp_path: Path, kills: Kills) -> None:
    """There files are moved one after the other: the configuration is the last."""

    def saved(place: Path, at: int = 0) -> Path:
        (place / "out").mkdir(parents=True)
        (place / "out" / "note").write_bytes(b"mine")
        with kills.below(place, at):
            mmdgs.save(small(), place / "out")
        return place / "out"

    digest = mmdgs.load(saved(tmp_path / "whole")).digest
    for at in range(1, kills.count + 1):
        out = saved(tmp_path / str(at), at)
        assert (out / "note").read_bytes() == b"mine"
        if (out / "config.json").exists():
            assert mmdgs.load(out).digest == digest, at


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may be larger: the write that is fails as one on a full disk does."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(
    "name", ["save", "save over another", "export", "export over another", "convert"]
)
def test_a_full_disk_changes_nothing(name: str, source: Path, tmp_path: Path) -> None:
    out = started(name, tmp_path / "place")
    before = contents(tmp_path / "place")
    for size in (0, 300):
        with full_disk(size), pytest.raises((OSError, UsageError), match="File too large"):
            WRITERS[name](source, out)
        assert contents(tmp_path / "place") == before
    assert "over" in name or not out.parent.exists()


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(OSError, match=r"a\.json") as raised, file_written_atomically(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert raised.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


def test_two_who_write_the_same_file_or_folder_do_not_meet(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with file_written_atomically(a) as first, file_written_atomically(a) as second:
        first.write(b"first")
        second.write(b"2")
    assert (tmp_path / "a").read_bytes() == b"first"  # the last to end
    with folder_written_atomically(b) as one, folder_written_atomically(b) as other:
        (one / "x").write_bytes(b"one")
        (other / "y").write_bytes(b"other")
    assert contents(tmp_path / "b") == {"x": b"one"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    half_written(tmp_path / "a").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_hidden_files_of_others_stay(tmp_path: Path) -> None:
    for name in (".out.old", ".out.backup"):
        mmdgs.save(small(), tmp_path / name)
    mmdgs.save(small(), tmp_path / "out")
    export_model(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.backup", ".out.old", "out"]


def test_a_folder_caught_between_two_renames_is_put_back(tmp_path: Path) -> None:
    mmdgs.save(small(), tmp_path / "runs" / "best")
    (tmp_path / "runs" / "best").rename(tmp_path / "runs" / ".best.mmdgs-old")
    with output_folder(tmp_path):
        assert mmdgs.load(tmp_path / "runs" / "best").shape == (2,)


def test_a_model_in_use_is_replaced_in_all_its_forms(tmp_path: Path) -> None:
    """Shards over one file, one file over shards: nothing of the other stays."""
    model = tiny_model()
    for shard_mb in (None, 0.05, None):
        model.save_pretrained(tmp_path / "m", shard_mb=shard_mb)
        files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
        assert (files == ["model.safetensors"]) is (shard_mb is None)
        assert mmdgs.load(tmp_path / "m").digest == model.digest
