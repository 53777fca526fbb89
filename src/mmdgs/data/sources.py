"""Where data files are looked for, and how public ones are downloaded."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.error import HTTPError

from mmdgs.errors import UsageError, unknown_name
from mmdgs.files import file_written_atomically, new_folder
from mmdgs.runtime import progress_bar

ENVIRONMENT = "MMDGS_DATA"
CACHE_ENVIRONMENT = "MMDGS_CACHE"
TIMEOUT = 30.0
"""Seconds without an answer after which a server is given up."""
CHUNK = 1 << 16


@dataclass(frozen=True)
class Source:
    """A public file: its name, its MD5 or SHA-256 and its addresses, tried in turn."""

    file: str
    checksum: str
    urls: tuple[str, ...]


class _DownloadFailed(Exception):  # noqa: N818  never leaves this module
    """One address did not give the file; the text says why."""


def data_folder(data_dir: Path | str | None = None) -> Path:
    """The folder of the data sets: `data_dir`, else MMDGS_DATA, else the user's cache folder."""
    place = data_dir or os.environ.get(ENVIRONMENT)
    folder = Path(place).expanduser() if place else cache_folder() / "data"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the data folder {folder} is a file; give the folder it is in")
    return folder


def check_split(name: str, split: str, choices: Sequence[str]) -> None:
    """Refuse a split that a set does not have."""
    if split not in choices:
        raise unknown_name(f"split of {name}", split, choices)


def cache_folder() -> Path:
    """Where downloads and cached results are kept: MMDGS_CACHE, else ~/.cache/mmdgs."""
    place = os.environ.get(CACHE_ENVIRONMENT)
    if place:
        return Path(place).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "mmdgs"


def obtain(name: str, sources: Sequence[Source], root: Path, *, download: bool) -> Path:
    """The folder ROOT/NAME with all these files in it, the missing ones downloaded."""
    folder = root / name
    missing = [source for source in sources if not (folder / source.file).is_file()]
    for source in missing:
        failures = fetch(source, folder) if download else ["downloading is switched off"]
        if failures:
            files = ", ".join(source.file for source in missing)
            raise UsageError(
                f"{name} was not found in {root}, and {source.file} could not be downloaded "
                f"({'; '.join(failures)}); put {files} in {folder}, or name the folder that holds "
                f"them with --data-dir or the environment variable {ENVIRONMENT}"
            )
    return folder


def fetch(source: Source, folder: Path) -> list[str]:
    """Download a file; returns what went wrong at each address if none gave it."""
    failures = []
    for url in source.urls:
        try:
            with new_folder(folder):
                _download(url, folder / source.file, source.checksum)
            return []
        except _DownloadFailed as failure:
            failures.append(f"{url}: {failure}")
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot write in the data folder {folder}: {reason}") from error
    return failures


def _download(url: str, target: Path, checksum: str) -> None:
    """Download a file, which gets its name once its checksum is right."""
    digest = hashlib.new("md5" if len(checksum) == 32 else "sha256", usedforsecurity=False)
    with file_written_atomically(target) as stream:
        for chunk in _chunks(url, target.name):
            stream.write(chunk)
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            got = f"its {digest.name} is {digest.hexdigest()}"
            raise _DownloadFailed(f"{got}, expected {checksum}")


def _chunks(url: str, label: str) -> Iterator[bytes]:
    """The body of an answer in pieces; every failure of the network becomes _DownloadFailed."""
    request = urllib.request.Request(url, headers={"User-Agent": "mmdgs"})
    received = total = 0
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            total = int(response.headers.get("Content-Length") or 0)
            with progress_bar(total, f"downloading {label}", unit="B") as bar:
                bar.unit_scale = True
                while chunk := response.read(CHUNK):
                    received += len(chunk)
                    bar.update(len(chunk))
                    yield chunk
    except IncompleteRead:
        pass  # older versions of Python do not raise it: the count below finds both
    except HTTPError as error:
        error.close()  # it holds the connection
        raise _DownloadFailed(f"HTTP status {error.code}, {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise _DownloadFailed(reason) from error
    if received < total:
        raise _DownloadFailed(f"it broke off after {received:,} of {total:,} bytes")
