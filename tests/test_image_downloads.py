"""Downloads of public data, from a server on this computer."""

from __future__ import annotations

import gzip
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mmdgs.data import cifar, idx, load_images, sources
from mmdgs.errors import UsageError

PIXELS = struct.pack(">4I", 2051, 2, 40, 40) + bytes(range(200)) * 16
FILES = {
    "train-images-idx3-ubyte.gz": gzip.compress(PIXELS, mtime=0),
    "train-labels-idx1-ubyte.gz": gzip.compress(struct.pack(">2I2B", 2049, 2, 3, 7), mtime=0),
}
IMAGES, LABELS = FILES


class Server:
    """Serves `bodies`, cut at `cut` bytes."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.cut: int | None = None
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                body = server.bodies.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: server.cut])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def mnist(server: Server, monkeypatch) -> Server:
    """A server that has MNIST, which is the only mirror."""
    server.bodies = {f"/mnist/{name}": content for name, content in FILES.items()}
    monkeypatch.setattr(idx, "MIRRORS", (f"{server.url}/mnist/",))
    monkeypatch.setattr(
        idx, "MD5", {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()}
    )
    return server


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def left(folder: Path) -> list[str]:
    """All files below a folder, temporary ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(*parts: object):
    return pytest.raises(UsageError, match=".*".join(re.escape(str(part)) for part in parts))


def test_a_set_is_downloaded_once(tmp_path: Path, mnist: Server) -> None:
    images = load_images("mnist", data_dir=tmp_path / "data")
    assert images.labels.tolist() == [3, 7]
    assert images.images[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert left(tmp_path) == [f"data/mnist/{name}" for name in (IMAGES, LABELS)]
    assert (tmp_path / "data" / "mnist" / IMAGES).read_bytes() == FILES[IMAGES]
    assert (tmp_path / "data" / "mnist" / IMAGES).stat().st_mode & 0o777 == 0o644
    assert mnist.asked == [f"/mnist/{name}" for name in (IMAGES, LABELS)]
    load_images("mnist", data_dir=tmp_path / "data")
    assert len(mnist.asked) == 2


def test_the_next_mirror_helps_out(tmp_path: Path, mnist: Server, monkeypatch) -> None:
    mnist.bodies |= {f"/bad/{name}": b"<html>sorry</html>" for name in FILES}
    mirrors = (dead_url(), f"{mnist.url}/none/", f"{mnist.url}/bad/", *idx.MIRRORS)
    monkeypatch.setattr(idx, "MIRRORS", mirrors)
    assert len(load_images("mnist", data_dir=tmp_path)) == 2
    assert left(tmp_path) == [f"mnist/{name}" for name in (IMAGES, LABELS)]


def test_a_wrong_checksum(tmp_path: Path, mnist: Server) -> None:
    mnist.bodies[f"/mnist/{IMAGES}"] = wrong = FILES[IMAGES][:-1] + b"!"
    with refused(IMAGES, *(hashlib.md5(content).hexdigest() for content in (wrong, FILES[IMAGES]))):
        load_images("mnist", data_dir=tmp_path)
    assert left(tmp_path) == []


def test_a_body_that_breaks_off(tmp_path: Path, mnist: Server) -> None:
    mnist.cut = 50
    with refused(mnist.url, f"50 of {len(FILES[IMAGES])}"):
        load_images("mnist", data_dir=tmp_path)
    assert left(tmp_path) == []
    mnist.cut = None
    assert len(load_images("mnist", data_dir=tmp_path)) == 2


def test_a_download_that_is_stopped_leaves_nothing(
    tmp_path: Path, mnist: Server, monkeypatch
) -> None:
    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sources.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        load_images("mnist", data_dir=tmp_path)
    assert left(tmp_path) == []


def test_no_mirror_at_all(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    mirrors = dead_url(), dead_url()
    monkeypatch.setattr(idx, "MIRRORS", mirrors)
    with refused(*mirrors, IMAGES, tmp_path / "mnist", "--data-dir"):
        load_images("mnist", data_dir=tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mnist", "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"),
        ("cifar10", "cifar-10-python.tar.gz"),
    ],
)
def test_downloading_switched_off(tmp_path: Path, name: str, files: str) -> None:
    with refused(name, f"put {files} in {tmp_path / name}", "--data-dir"):
        load_images(name, "test", data_dir=tmp_path, download=False)


def test_cifar_is_downloaded_as_its_archive(tmp_path: Path, server: Server, monkeypatch) -> None:
    body = b"not the archive, but with the right checksum"
    server.bodies["/cifar-10-python.tar.gz"] = body
    url = f"{server.url}/cifar-10-python.tar.gz"
    monkeypatch.setattr(
        cifar, "ARCHIVE", sources.Source(cifar.ARCHIVE.file, hashlib.md5(body).hexdigest(), (url,))
    )
    with refused(tmp_path / "cifar10" / "cifar-10-python.tar.gz", "not a tar.gz archive"):
        load_images("cifar10", data_dir=tmp_path)
    assert left(tmp_path) == ["cifar10/cifar-10-python.tar.gz"]


def test_a_sha256_checksum_is_known_by_its_length(tmp_path: Path, server: Server) -> None:
    server.bodies, urls = {"/weights": b"some weights"}, (f"{server.url}/weights",)
    right, wrong = (hashlib.sha256(body).hexdigest() for body in (b"some weights", b"others"))
    assert right in sources.fetch(sources.Source("weights", wrong, urls), tmp_path)[0]
    assert left(tmp_path) == []
    assert not sources.fetch(sources.Source("weights", right, urls), tmp_path)
    assert left(tmp_path) == ["weights"]
