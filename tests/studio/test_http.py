"""What clients of the studio may ask, over HTTP: their own files, so many bytes and requests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import httpx
import numpy
import pytest
from conftest import Studio
from gradio.state_holder import SessionState
from PIL import Image

from mmdgs.studio import guard, page
from mmdgs.studio.controls import plainly
from mmdgs.studio.sources import MOST_BYTES

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
    with client_of(address) as browser:
        yield browser


class Endpoint:
    """A function of the page, with the values that its inputs have on a new page."""

    def __init__(self, config: dict, dependency: dict) -> None:
        components = {component["id"]: component for component in config["components"]}
        self.number, self.name = dependency["id"], dependency["api_name"]
        self.inputs = [components[number] for number in dependency["inputs"]]
        self.kinds = [component["type"] for component in self.inputs]

    def data(self, place: int | None = None, value: object = None) -> list:
        fresh = [component["props"].get("value") for component in self.inputs]
        return [value if i == place else old for i, old in enumerate(fresh)]


@pytest.fixture(scope="module")
def endpoints(address: str) -> list[Endpoint]:
    config = httpx.get(f"{address}/config", timeout=60).json()
    return [Endpoint(config, dependency) for dependency in config["dependencies"]]


def endpoint_with(endpoints: list[Endpoint], kind: str) -> tuple[Endpoint, int]:
    """An endpoint with an input of this kind, and the place of the input."""
    endpoint = next(endpoint for endpoint in endpoints if kind in endpoint.kinds)
    return endpoint, endpoint.kinds.index(kind)


def picture(shade: int = 90) -> bytes:
    content = io.BytesIO()
    Image.fromarray(numpy.full((40, 40), shade, numpy.uint8)).save(content, format="PNG")
    return content.getvalue()


def upload(client: httpx.Client, content: bytes, **options: object) -> httpx.Response:
    return client.post(f"{API}/upload", files={"files": ("own.png", content)}, **options)


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


def queued(client: httpx.Client, endpoint: Endpoint, data: list) -> str:
    """A call as the page makes it."""
    body = {"data": data, "fn_index": endpoint.number, "session_hash": "page-of-test"}
    joined = client.post(f"{API}/queue/join", json=body)
    if not joined.is_success:
        return joined.text
    return heard_at(client, f"{API}/queue/data", session_hash="page-of-test")


def called(client: httpx.Client, endpoint: Endpoint, data: list) -> str:
    """A call as a program makes it."""
    address = f"{API}/call/{endpoint.name}"
    joined = client.post(address, json={"data": data})
    if not joined.is_success:
        return joined.text
    return heard_at(client, f"{address}/{joined.json()['event_id']}")


def test_no_endpoint_takes_a_path_that_is_no_upload(
    studio: Studio, endpoints, client, tmp_path: Path
) -> None:
    (tmp_path / "private.png").write_bytes(picture(201))
    private, missing = (file_data(str(tmp_path / f"{name}.png")) for name in ("private", "missing"))
    for endpoint in endpoints:
        for i in range(len(endpoint.inputs)):
            heard = queued(client, endpoint, endpoint.data(i, private))
            if i == 0:
                heard += called(client, endpoint, endpoint.data(i, missing))
            assert heard.count(NO_FILE) == 1 + (i == 0), (endpoint.name, i, heard)
            assert str(tmp_path) not in heard
    assert not list(studio.scratch.rglob("private.png")), "nothing was copied"


def test_no_other_file_comes_in_by_any_shape(studio: Studio, endpoints, client) -> None:
    with client_of(studio.address) as somebody:
        other = upload(somebody, picture(17)).json()[0]
    folder = next(studio.scratch.glob("mmdgs-studio-*"))
    inside = next(file for file in folder.rglob("*.png"))
    before = {file for file in folder.rglob("*") if file.is_file()}
    endpoint, place = endpoint_with(endpoints, "file")
    painting, paint_place = endpoint_with(endpoints, "imageeditor")
    blank = {"background": None, "layers": [], "composite": None}
    paths = ["/dev/zero", "/etc/hostname", "/proc/self/environ", "http://127.0.0.1:1/x.png", ""]
    paths += ["https://example.org/x.png", "file:///etc/hostname", "../../etc/hostname"]
    paths += [other, f"{other}/../own.png", f"{inside}/../..", str(folder)]
    for path in paths:
        data = endpoint.data(place, file_data(path))
        assert NO_FILE in called(client, endpoint, data), path
        body = {"data": data, "session_hash": "direct"}
        answer = client.post(f"{API}/run/{endpoint.name}", json=body).text
        assert "does not accept direct" in answer
        assert client.get(f"{API}/file={path}").status_code in (403, 404), path
    shapes = [[file_data(other)], {"path": other}, file_data(other, is_stream=True, url=other)]
    for shape in shapes:
        assert NO_FILE in called(client, endpoint, endpoint.data(place, shape)), shape
    for part in ({"background": file_data(other)}, {"layers": [file_data(other)]}):
        data = painting.data(paint_place, blank | part)
        assert NO_FILE in called(client, painting, data), part
    assert {file for file in folder.rglob("*") if file.is_file()} == before


def test_an_upload_is_its_visitors_alone(studio: Studio, endpoints, client) -> None:
    path = upload(client, picture(17)).json()[0]
    endpoint, place = endpoint_with(endpoints, "file")
    hostile = file_data(path, orig_name="../../x.png", url="http://127.0.0.1:1/x.png")
    data = endpoint.data(place, hostile)
    assert "event: complete" in called(client, endpoint, data)
    assert client.get(f"{API}/file={path}").content == picture(17)
    with client_of(studio.address) as somebody:
        assert somebody.get(f"{API}/file={path}").status_code == 403
        assert NO_FILE in called(somebody, endpoint, data)
        somebody.cookies.clear()
        name = f"mmdgs-studio-{httpx.URL(studio.address).port}"
        somebody.cookies.set(name, client.cookies[name][:-1] + "g")
        assert somebody.get(f"{API}/file={path}").status_code == 403, "another signature"
        assert upload(somebody, picture(17)).json()[0] == path, "the same content, the same place"
        assert somebody.get(f"{API}/file={path}").status_code == 200


def test_routes_that_no_page_needs_are_closed_and_every_answer_has_our_headers(client) -> None:
    closed = {
        "GET": "file/etc/hostname proxy=http://127.0.0.1:1/ stream/a/b/1/playlist-file of-a-later "
        "custom_component/a/client/component/style.css deep_link?session_hash=a "
        "/monitoring /svelte/x /login",
        "POST": "process_recording vibe-edit stream/a of-a-later",
        "DELETE": "upload",
        "PUT": "/",
    }
    for method, paths in closed.items():
        for path in paths.split():
            address = path if path.startswith("/") else f"{API}/{path}"
            assert client.request(method, address).status_code in (403, 404), path
    for path in ("/", "/no-such-page"):
        assert "default-src 'self'" in client.get(path).headers["content-security-policy"]


def test_pages_of_other_sites_can_send_nothing(client) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert upload(client, picture(), headers={"sec-fetch-site": site}).status_code == status
    for host in ("elsewhere.example", "127.0.0.1.elsewhere.example"):
        assert client.get("/config", headers={"host": host}).status_code == 400


def test_uploads_are_bounded(address: str) -> None:
    with client_of(address) as client:
        assert upload(client, bytes(MOST_BYTES + 1)).status_code == 413
        many = [("files", (f"{i}.png", bytes([i]) * (MOST_BYTES // 4))) for i in range(6)]
        assert client.post(f"{API}/upload", files=many).status_code == 413, "several are one"
        chunks = (bytes(100_000) for _ in range(100))
        joined = client.post(f"{API}/queue/join", content=chunks)
        assert joined.status_code == 413, "what has no length"
        statuses = [upload(client, bytes([i]) * (MOST_BYTES - 1000)).status_code for i in range(10)]
        allowed = statuses.index(413)
        assert 4 <= allowed <= guard.SENT_BY_VISITOR // MOST_BYTES
        assert statuses == [200] * allowed + [413] * (10 - allowed)
    with client_of(address) as client:
        assert upload(client, picture()).status_code == 200, "others go on"


def test_a_painting_has_few_layers(endpoints, client) -> None:
    painting, place = endpoint_with(endpoints, "imageeditor")
    fields = {"type": "layer", "id": "painting", "session_hash": "page", "fn_name": "accept_blobs"}
    fields["component_id"] = str(painting.inputs[place]["id"])
    for index, status in (("0", 200), ("1000000000", 413), ("-1", 413)):
        data = fields | {"index": index}
        sent = client.post(f"{API}/component_server", data=data, files={"file": picture()})
        assert sent.status_code == status, sent.text


def test_one_client_does_not_fill_the_line(address: str, endpoints) -> None:
    endpoint = next(endpoint for endpoint in endpoints if endpoint.name == "sampler")
    later = [other for other in endpoints if other.number > endpoint.number]
    end = next(other for other in later if other.name.startswith("end"))
    data = endpoint.data(3, 100)  # levels: minutes of work
    events = []

    def ask(client: httpx.Client) -> int:
        call = {"fn_index": endpoint.number, "session_hash": f"line-{len(events)}"}
        asked = client.post(f"{API}/queue/join", json={**call, "data": data})
        if asked.is_success:
            events.append({**call, "event_id": asked.json()["event_id"]})
        return asked.status_code

    def filled(client: httpx.Client) -> int:
        """How many requests a client could add before one was refused."""
        return next(i for i in range(40) if ask(client) == 503)

    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    try:
        with (
            client_of(address) as first,
            client_of(address) as second,
            client_of(address) as third,
            client_of(address, transport=elsewhere) as far,
        ):
            assert page.WAITING_VISITOR <= filled(first) <= page.WAITING_VISITOR + 2
            assert filled(second) >= page.WAITING_VISITOR
            assert filled(third) < page.WAITING_VISITOR, "all browsers of an address are bounded"
            assert ask(far) == 200, "somebody at another address still gets a place"
    finally:
        with client_of(address) as client:
            for event in reversed(events):
                client.post(f"{API}/cancel", json=event)
                body = {"data": [], "fn_index": end.number, "session_hash": event["session_hash"]}
                assert client.post(f"{API}/run/predict", json=body).status_code == 200
            assert client.get(f"{API}/queue/status").json()["queue_size"] == 0


def test_the_allowance_of_uploads_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    allowance, now = guard.Allowance(), 0.0
    monkeypatch.setattr(guard.time, "monotonic", lambda: now)
    for i in range(guard.SENT_BY_ADDRESS // guard.SENT_BY_VISITOR):
        assert allowance.take(f"visitor {i}", "here", guard.SENT_BY_VISITOR)
        assert not allowance.take(f"visitor {i}", "elsewhere", 1)
    assert not allowance.take("somebody new", "here", 1)
    assert allowance.take("somebody new", "there", 1)
    for i in range(10):
        allowance.take(f"far {i}", f"address {i}", guard.SENT_BY_VISITOR)
    assert not allowance.take("the last", "the last", guard.SENT_BY_VISITOR)
    now = guard.AGE + 1
    assert allowance.take("visitor 0", "here", guard.SENT_BY_VISITOR)
    assert len(allowance._totals) == 3, "what is over is forgotten"


def test_cookies_and_tokens() -> None:
    ours, others = guard.Visitors("a secret token"), guard.Visitors("a secret token")
    name, cookie = ours.new()
    assert ours.name_in(cookie) == name
    assert others.name_in(cookie) is None
    assert not any(map(ours.name_in, ("", name, f"{name}.", f"x{cookie}", "é.é")))
    assert ours.admits("a secret token")
    assert not any(map(ours.admits, ("a secret toke", "", "é")))
    assert guard.Visitors().admits("")


STUCK = """
import sys, time
from mmdgs.studio import plane
plane.run_chains = lambda *args, **kwargs: time.sleep(600)
from mmdgs.__main__ import main
sys.argv[1:1] = ["studio"]
main()
"""


def test_other_machines_need_the_token_and_a_stuck_job_does_not_keep_it_from_ending(
    tmp_path: Path,
) -> None:
    studio = Studio(tmp_path, "--host", "0.0.0.0", program=("-c", STUCK))
    try:
        printed = httpx.URL(studio.address)
        token = printed.params["token"]
        assert len(token) >= 32
        address = f"http://127.0.0.1:{printed.port}"
        with httpx.Client(base_url=address, timeout=60) as client:
            for path in ("/", "/config", "/?token=wrong", f"/?token={token[:-1]}", f"{API}/info"):
                assert client.get(path).status_code == 401, path
            assert upload(client, picture()).status_code == 401
            assert not client.cookies
            shown = client.get("/", params={"token": token})
            assert (shown.status_code, shown.headers["location"]) == (303, "/")
            assert "HttpOnly" in shown.headers["set-cookie"]
            assert token not in shown.headers["set-cookie"]
            assert client.get("/").status_code == 200
            functions = client.get("/config").json()["dependencies"]
            number = next(one["id"] for one in functions if one["api_name"] == "plane")
            data = ["mog", 0.3, "full", 100, 100, 0]
            body = {"data": data, "fn_index": number, "session_hash": "stuck"}
            assert client.post(f"{API}/queue/join", json=body).status_code == 200
            time.sleep(1)
        bearer = {"authorization": f"Bearer {token}"}
        assert httpx.get(f"{address}/config", headers=bearer).status_code == 200
    finally:
        seconds = studio.end()
    assert seconds < 10


def test_answers_leave_nothing_behind_in_a_session() -> None:
    async def components(rounds: int) -> tuple[int, int]:
        """Those of a page, and of a session after so many answers to each of two outputs."""
        with gr.Blocks(analytics_enabled=False) as blocks:
            first, second, button = gr.HTML(), gr.Markdown(), gr.Button()
            for part in (first, second):
                button.click(plainly(lambda part=part: {part: "new"}), None, [first, second])
        session = SessionState(blocks)
        for _ in range(rounds):
            for function in blocks.fns.values():
                await blocks.postprocess_data(function, function.fn(), session)
        return len(blocks.blocks), len(session.blocks_config.blocks)

    before, after = asyncio.run(components(10))
    assert after == before
