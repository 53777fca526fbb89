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

from mmdgs.errors import UsageError, nearest
from mmdgs.files import file_written_atomically, made
from mmdgs.runtime import progress_bar

ENVIRONMENT = "MMDGS_DATA"
CACHE_ENVIRONMENT = "MMDGS_CACHE"
TIMEOUT = 30.0
"""Seconds without an answer after which a server is given up."""
CHUNK = 1 << 16


@dataclass(frozen=True)
class Source:
    """A public file: its name, its checksum (MD5 or SHA-256 in hexadecimal) and its addresses, tried in turn."""

    file: str
    checksum: str
    urls: tuple[str, ...]


class _DownloadFailed(Exception):  # noqa: N818  never leaves this module
    """One address did not give the file; the text says why."""


def data_folder(data_dir: Path | str | None = None) -> Path:
    """The folder of the data sets: `data_dir`, else the environment's MMDGS_DATA, else the user's cache folder."""
    chosen = data_dir or os.environ.get(ENVIRONMENT)
    folder = Path(chosen).expanduser() if chosen else cache_folder() / "data"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the data folder {folder} is a file; give the folder it is in")
    return folder


def check_split(name: str, split: str, choices: Sequence[str]) -> None:
    """Refuse a split that a set does not have."""
    if split not in choices:
        raise UsageError(
            f"unknown split {split!r} of {name}{nearest(split, choices)}; choose one of {', '.join(choices)}"
        )


def cache_folder() -> Path:
    """Where what is downloaded or computed once is kept: the environment's MMDGS_CACHE, else ~/.cache/mmdgs."""
    chosen = os.environ.get(CACHE_ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "mmdgs"


def obtain(name: str, sources: Sequence[Source], root: Path, *, download: bool) -> Path:
    """The folder ROOT/NAME with all these files in it, the missing ones downloaded; refused where that fails."""
    folder = root / name
    missing = [source for source in sources if not (folder / source.file).is_file()]
    if missing and not download:
        raise _absent(name, missing, root, "and downloading is switched off")
    for source in missing:
        failures = fetch(source, folder)
        if failures:
            reason = f"and {source.file} could not be downloaded ({'; '.join(failures)})"
            raise _absent(name, missing, root, reason)
    return folder


def _absent(name: str, missing: Sequence[Source], root: Path, reason: str) -> UsageError:
    files = ", ".join(source.file for source in missing)
    return UsageError(
        f"{name} was not found in {root}, {reason}; put {files} in {root / name}, or name the folder that holds "
        f"them with --data-dir or the environment variable {ENVIRONMENT}"
    )


def fetch(source: Source, folder: Path) -> list[str]:
    """Download a file; what went wrong at each address if none gave it, else nothing."""
    failures = []
    for url in source.urls:
        try:
            with made(folder):
                _download(url, folder / source.file, source.checksum)
            return []
        except _DownloadFailed as failure:
            failures.append(f"{url}: {failure}")
        except OSError as error:
            raise UsageError(f"cannot write in the data folder {folder}: {error.strerror or error}") from error
    return failures


def _download(url: str, target: Path, checksum: str) -> None:
    """Download a file, which gets its name once its checksum is right."""
    kind = "SHA-256" if len(checksum) == hashlib.sha256().digest_size * 2 else "MD5"
    digest = hashlib.sha256() if kind == "SHA-256" else hashlib.md5(usedforsecurity=False)
    with file_written_atomically(target) as stream:
        for chunk in _chunks(url, target.name):
            stream.write(chunk)
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            raise _DownloadFailed(f"its {kind} checksum is {digest.hexdigest()}, expected {checksum}")


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
        pass  # newer versions of Python raise it for what older ones pass over: the count below tells both
    except HTTPError as error:
        error.close()  # it holds the connection
        raise _DownloadFailed(f"HTTP status {error.code}, {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise _DownloadFailed(str(getattr(error, "reason", error)) or type(error).__name__) from error
    if received < total:
        raise _DownloadFailed(f"it broke off after {received:,} of {total:,} bytes")
