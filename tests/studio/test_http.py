"""What clients of the studio may ask, over HTTP: their own files and no others, so many bytes, so many requests."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy
import pytest
from conftest import Studio
from PIL import Image

from mmdgs.studio import page, visitors
from mmdgs.studio.guard import ROUTES
from mmdgs.studio.sources import MOST_BYTES
from mmdgs.studio.visitors import Allowance, Visitors

API = "/gradio_api"
NO_FILE = "This is no file of yours"
DONE = re.compile(r'"process_completed"|"unexpected_error"|^event: (complete|error)')


@contextlib.contextmanager
def client_of(address: str, **options: object) -> Iterator[httpx.Client]:
    """A browser: it keeps its cookie."""
    with httpx.Client(base_url=address, timeout=60, **options) as client:
        client.get("/")
        yield client


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with client_of(address) as one:
        yield one


@pytest.fixture(scope="module")
def config(address: str) -> dict:
    return httpx.get(f"{address}/config", timeout=60).json()


def picture(shade: int = 90) -> bytes:
    content = io.BytesIO()
    Image.fromarray(numpy.full((40, 40), shade, numpy.uint8)).save(content, format="PNG")
    return content.getvalue()


def upload(client: httpx.Client, content: bytes, name: str = "own.png") -> httpx.Response:
    return client.post(f"{API}/upload", files={"files": (name, content)})


def file_data(path: object, **more: object) -> dict:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, **more}


def heard_at(client: httpx.Client, address: str, **params: str) -> str:
    """What a stream of events says until the call is done."""
    heard = []
    with client.stream("GET", address, params=params) as stream:
        for line in stream.iter_lines():
            heard.append(line)
            if line.startswith("data: ") and DONE.search("\n".join(heard[-2:])):
                break
    return "\n".join(heard)


def queued(client: httpx.Client, endpoint: dict, data: list) -> str:
    """A call as the page makes it."""
    session = "page-of-test"
    body = {"data": data, "fn_index": endpoint["id"], "session_hash": session}
    joined = client.post(f"{API}/queue/join", json=body)
    return heard_at(client, f"{API}/queue/data", session_hash=session) if joined.is_success else joined.text


def called(client: httpx.Client, endpoint: dict, data: list) -> str:
    """A call as a program makes it."""
    joined = client.post(f"{API}/call/{endpoint['api_name']}", json={"data": data})
    if not joined.is_success:
        return joined.text
    return heard_at(client, f"{API}/call/{endpoint['api_name']}/{joined.json()['event_id']}")


def direct(client: httpx.Client, endpoint: dict, data: list) -> str:
    """A call beside the queue."""
    return client.post(f"{API}/run/{endpoint['api_name']}", json={"data": data, "session_hash": "direct"}).text


def calls_with(config: dict, payload: object) -> Iterator[tuple[dict, list]]:
    """Every endpoint, with a payload in place of each of its inputs in turn; the others are as on a new page."""
    values = {component["id"]: component["props"].get("value") for component in config["components"]}
    for endpoint in config["dependencies"]:
        fresh = [values[number] for number in endpoint["inputs"]]
        for i in range(len(fresh)):
            yield endpoint, [*fresh[:i], payload, *fresh[i + 1 :]]


def endpoint_with(config: dict, kind: str) -> tuple[dict, int]:
    """An endpoint with an input of this kind, and the place of the input."""
    kinds = {component["id"]: component["type"] for component in config["components"]}
    for endpoint in config["dependencies"]:
        for i, number in enumerate(endpoint["inputs"]):
            if kinds[number] == kind:
                return endpoint, i
    raise AssertionError(f"no endpoint takes {kind}")


def fresh_data(config: dict, endpoint: dict) -> list:
    values = {component["id"]: component["props"].get("value") for component in config["components"]}
    return [values[number] for number in endpoint["inputs"]]


def test_no_endpoint_takes_a_path_that_is_no_upload(studio: Studio, config, client, tmp_path: Path) -> None:
    (tmp_path / "private.png").write_bytes(picture(201))
    for call, name in ((queued, "private.png"), (called, "missing.png")):
        for endpoint, data in calls_with(config, file_data(str(tmp_path / name))):
            heard = call(client, endpoint, data)
            assert NO_FILE in heard, (endpoint["api_name"], data, heard)
            assert str(tmp_path) not in heard
    assert not list(studio.scratch.rglob("private.png")), "nothing was copied"


def hostile_paths(other: str, folder: Path) -> list[str]:
    inside = next(file for file in folder.rglob("*.png"))
    return [
        "/dev/zero", "/etc/hostname", "/proc/self/environ", "http://127.0.0.1:1/x.png", "https://example.org/x.png",
        "file:///etc/hostname", "../../etc/hostname", other, f"{other}/../own.png", f"{inside}/../..", str(folder), "",
    ]  # fmt: skip


def test_no_other_file_comes_in_by_any_shape(studio: Studio, config, client, tmp_path: Path) -> None:
    with client_of(studio.address) as somebody:
        other = upload(somebody, picture(17), "theirs.png").json()[0]
    endpoint, place = endpoint_with(config, "file")
    painting, paint_place = endpoint_with(config, "imageeditor")
    folder = next(studio.scratch.glob("mmdgs-studio-*"))
    before = {file for file in folder.rglob("*") if file.is_file()}
    for path in hostile_paths(other, folder):
        shapes = [file_data(path), [file_data(path)], {"path": path}, file_data(path, is_stream=True, url=path)]
        for shape in shapes:
            data = fresh_data(config, endpoint)
            data[place] = shape
            assert NO_FILE in called(client, endpoint, data), shape
        assert "does not accept direct" in direct(client, endpoint, data)
        for part in ("background", "layers", "composite"):
            data = fresh_data(config, painting)
            data[paint_place] = {"background": None, "layers": [], "composite": None} | {
                part: [file_data(path)] if part == "layers" else file_data(path)
            }
            assert NO_FILE in called(client, painting, data), (path, part)
        assert client.get(f"{API}/file={path}").status_code in (403, 404), path
    assert {file for file in folder.rglob("*") if file.is_file()} == before


def test_an_upload_is_its_visitors_alone(studio: Studio, config, client) -> None:
    path = upload(client, picture(17)).json()[0]
    endpoint, place = endpoint_with(config, "file")
    data = fresh_data(config, endpoint)
    data[place] = file_data(path, orig_name="../../x.png", url="http://127.0.0.1:1/x.png")
    assert "event: complete" in called(client, endpoint, data)
    assert client.get(f"{API}/file={path}").content == picture(17)
    with client_of(studio.address) as somebody:
        assert somebody.get(f"{API}/file={path}").status_code == 403
        assert NO_FILE in called(somebody, endpoint, data)
        somebody.cookies.clear()
        name = f"mmdgs-studio-{httpx.URL(studio.address).port}"
        somebody.cookies.set(name, client.cookies[name][:-1] + "g")
        assert somebody.get(f"{API}/file={path}").status_code == 403, "a cookie with another signature"
        assert upload(somebody, picture(17)).json()[0] == path, "the same content lies in the same place"
        assert somebody.get(f"{API}/file={path}").status_code == 200


def test_routes_that_no_page_needs_are_closed(client) -> None:
    for method, path in [
        ("GET", f"{API}/file/etc/hostname"), ("GET", f"{API}/proxy=http://127.0.0.1:1/"), ("GET", "/monitoring"),
        ("POST", f"{API}/process_recording"), ("POST", f"{API}/vibe-edit"), ("GET", f"{API}/deep_link?session_hash=a"),
        ("GET", f"{API}/stream/a/b/1/playlist-file"), ("POST", f"{API}/stream/a"), ("PUT", "/"), ("GET", "/svelte/x"),
        ("GET", f"{API}/custom_component/a/client/component/style.css"), ("GET", "/login"),
    ]:  # fmt: skip
        assert client.request(method, path).status_code in (403, 404), path


def test_routes_that_a_later_gradio_adds_are_closed() -> None:
    for method, path in [("GET", "/gradio_api/new"), ("POST", "/gradio_api/new"), ("DELETE", "/gradio_api/upload")]:
        assert method not in ROUTES or not ROUTES[method].fullmatch(path)


def test_pages_of_other_sites_can_send_nothing(address: str, client) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        sent = client.post(f"{API}/upload", files={"files": ("a.png", picture())}, headers={"sec-fetch-site": site})
        assert sent.status_code == status
    assert client.get("/config", headers={"host": "elsewhere.example"}).status_code == 400
    assert client.get("/config", headers={"host": "127.0.0.1.elsewhere.example"}).status_code == 400


def test_uploads_are_bounded(address: str) -> None:
    with client_of(address) as client:
        assert upload(client, bytes(MOST_BYTES + 1)).status_code == 413
        many = [("files", (f"{i}.png", bytes([i]) * (MOST_BYTES // 4))) for i in range(6)]
        assert client.post(f"{API}/upload", files=many).status_code == 413, "several files are no more than one"
        chunks = (bytes(100_000) for _ in range(100))
        assert client.post(f"{API}/queue/join", content=chunks).status_code == 413, "nor is what has no length"
        statuses = [upload(client, bytes([i]) * (MOST_BYTES - 1000)).status_code for i in range(10)]
        allowed = statuses.index(413)
        assert 4 <= allowed <= visitors.SENT_BY_VISITOR // MOST_BYTES
        assert set(statuses[:allowed]) == {200}
        assert set(statuses[allowed:]) == {413}
    with client_of(address) as client:
        assert upload(client, picture()).status_code == 200, "others go on"


def test_a_painting_has_few_layers(config, client) -> None:
    painting, place = endpoint_with(config, "imageeditor")
    fields = {"type": "layer", "id": "painting", "session_hash": "page-of-test", "fn_name": "accept_blobs"}
    fields["component_id"] = str(painting["inputs"][place])
    for index, status in (("0", 200), ("1000000000", 413), ("-1", 413)):
        sent = client.post(f"{API}/component_server", data=fields | {"index": index}, files={"file": picture()})
        assert sent.status_code == status, sent.text


def test_one_client_does_not_fill_the_line(address: str, config) -> None:
    endpoint = next(one for one in config["dependencies"] if one["api_name"] == "sampler")
    end = next(
        one for one in config["dependencies"] if one["id"] > endpoint["id"] and one["api_name"].startswith("end")
    )
    data = fresh_data(config, endpoint)
    data[-2] = 100  # levels: minutes of work
    events = []

    def ask(client: httpx.Client) -> int:
        call = {"fn_index": endpoint["id"], "session_hash": f"line-{len(events)}"}
        asked = client.post(f"{API}/queue/join", json={**call, "data": data})
        if asked.is_success:
            events.append({**call, "event_id": asked.json()["event_id"]})
        return asked.status_code

    def filled(client: httpx.Client) -> int:
        """How many requests a client could add before one was refused."""
        return next(i for i in range(40) if ask(client) == 503)

    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    try:
        with client_of(address) as first, client_of(address) as second, client_of(address, transport=elsewhere) as far:
            assert page.WAITING_VISITOR <= filled(first) <= page.WAITING_VISITOR + 2
            assert filled(second) >= page.WAITING_VISITOR
            with client_of(address) as third:
                assert filled(third) < page.WAITING_VISITOR, "all browsers of one address together are bounded"
            assert ask(far) == 200, "somebody at another address still gets a place"
    finally:
        with client_of(address) as client:
            for event in reversed(events):
                client.post(f"{API}/cancel", json=event)
                body = {"data": [], "fn_index": end["id"], "session_hash": event["session_hash"]}
                assert client.post(f"{API}/run/predict", json=body).status_code == 200
            assert client.get(f"{API}/queue/status").json()["queue_size"] == 0


def test_the_allowance_of_uploads_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    allowance, now = Allowance(), 0.0
    monkeypatch.setattr(visitors.time, "monotonic", lambda: now)
    for i in range(visitors.SENT_BY_ADDRESS // visitors.SENT_BY_VISITOR):
        assert allowance.take(f"visitor {i}", "here", visitors.SENT_BY_VISITOR)
        assert not allowance.take(f"visitor {i}", "elsewhere", 1)
    assert not allowance.take("somebody new", "here", 1)
    assert allowance.take("somebody new", "there", 1)
    for i in range(10):
        allowance.take(f"far {i}", f"address {i}", visitors.SENT_BY_VISITOR)
    assert not allowance.take("the last", "the last", visitors.SENT_BY_VISITOR)
    now = visitors.AGE + 1
    assert allowance.take("visitor 0", "here", visitors.SENT_BY_VISITOR)
    assert allowance._totals == dict.fromkeys(("visitor visitor 0", "address here", "all"), visitors.SENT_BY_VISITOR)


def test_cookies_and_tokens() -> None:
    ours, others = Visitors("a secret token"), Visitors("a secret token")
    name, cookie = ours.new()
    assert ours.name_in(cookie) == name
    assert others.name_in(cookie) is None
    assert [ours.name_in(forged) for forged in ("", name, f"{name}.", f"x{cookie}", "é.é")] == [None] * 5
    assert [ours.admits(token) for token in ("a secret token", "a secret toke", "", "é")] == [True, False, False, False]
    assert Visitors().admits("")


STUCK = """
import sys, time
from mmdgs.studio import plane
plane.chains = lambda *args, **kwargs: time.sleep(600)
from mmdgs.__main__ import main
sys.argv[1:1] = ["studio"]
main()
"""


def test_other_machines_need_the_token_and_a_stuck_job_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    studio = Studio(tmp_path, "--host", "0.0.0.0", program=("-c", STUCK))
    try:
        printed = httpx.URL(studio.address)
        token = printed.params["token"]
        assert len(token) >= 32
        address = f"http://127.0.0.1:{printed.port}"
        with httpx.Client(base_url=address, timeout=60) as client:
            for path in ("/", "/config", "/theme.css", "/?token=wrong", f"/?token={token[:-1]}", f"{API}/info"):
                assert client.get(path).status_code == 401, path
            assert upload(client, picture()).status_code == 401
            assert not client.cookies
            shown = client.get("/", params={"token": token})
            assert (shown.status_code, shown.headers["location"]) == (303, "/")
            assert "HttpOnly" in shown.headers["set-cookie"]
            assert token not in shown.headers["set-cookie"]
            assert client.get("/").status_code == 200
            endpoint = next(one for one in client.get("/config").json()["dependencies"] if one["api_name"] == "plane")
            data = ["mog", 0.3, "full", 100, 100, 0]
            body = {"data": data, "fn_index": endpoint["id"], "session_hash": "stuck"}
            assert client.post(f"{API}/queue/join", json=body).status_code == 200
            time.sleep(1)
        assert httpx.get(f"{address}/config", headers={"authorization": f"Bearer {token}"}).status_code == 200
    finally:
        seconds = studio.end()
    assert seconds < 10
    assert "Traceback" not in studio.log.read_text()
