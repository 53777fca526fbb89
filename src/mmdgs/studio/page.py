"""The page of the studio: four rooms as tabs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import gradio as gr
from fastapi import HTTPException
from gradio.components.base import server

from mmdgs.studio import image, plane, restore, sampler
from mmdgs.studio.controls import Room
from mmdgs.studio.folder import Folder
from mmdgs.studio.streaming import STOPS

TITLE = "mmdgs studio"
ABOUT = "From a denoiser to p(x | noisy x): what it knows, and what it invents."
ROOMS = {"Plane": plane, "Image": image, "Restore": restore, "Sampler": sampler}
WAITING, WAITING_ADDRESS, WAITING_VISITOR = 40, 20, 8
"""Requests that may wait in line, of all, of an address and of a browser; more are refused."""
PAINTINGS, LAYERS = 64, 4
"""Paintings that wait for their run, and the layers of one."""
VISITORS = 64
"""Open pages whose results and regions are remembered; Gradio would remember 10,000."""

CSS = """
.gradio-container { max-width: 1200px !important; }
.mm-figures { display: flex; flex-wrap: wrap; gap: 12px; }
.mm-figures figure { margin: 0; }
.mm-figures figure.mm-small { flex: 0 1 132px; }
.mm-figures figure.mm-wide { flex: 1 1 190px; max-width: 320px; }
.mm-figures figure.mm-stack { flex: 1 1 240px; max-width: 420px; }
.mm-figures img { width: 100%; image-rendering: pixelated; border-radius: 4px; display: block; }
.mm-figures img.mm-smooth, .mm-figures figure.mm-wide img { image-rendering: auto; }
.mm-frame { position: relative; }
.mm-frame img + img { position: absolute; inset: 0; visibility: hidden; }
.mm-fades .mm-frame { cursor: crosshair; }
.mm-fades .mm-frame img { visibility: visible; }
.mm-fades img + img { opacity: 0; }
.mm-frame i { position: absolute; outline: 2px solid rgb(255, 64, 64); }
.mm-stack figcaption { display: flex; align-items: center; gap: 8px; }
.mm-stack figcaption input { flex: 1 1 60px; min-width: 60px; }
.mm-stack button { padding: 2px 10px; border-radius: 4px; min-width: 64px; }
.mm-stack button { background: var(--button-secondary-background-fill); }
.mm-stack button { color: var(--button-secondary-text-color); }
#sampler-pictures img { image-rendering: pixelated !important; }
#plane-panels .mm-figures { display: grid; grid-template-columns: repeat(2, minmax(0, 225px)); }
#plane-panels img { border: 1px solid var(--border-color-primary); }
.mm-figures figcaption, .mm-bars { color: var(--body-text-color); }
.mm-figures figcaption { font-size: 13px; line-height: 1.3; margin-top: 4px; }
#image-moved figure.mm-small { flex-basis: 200px; }
.mm-plane img { cursor: crosshair; }
.mm-status { min-height: 24px; }
.mm-bars { border-collapse: collapse; font-size: 14px; width: 100%; max-width: 560px; }
.mm-bars td { padding: 3px 8px 3px 0; white-space: nowrap; border: 0; }
.mm-bars td.mm-bar { width: 60%; position: relative; padding: 0; }
.mm-bars td.mm-bar { background: var(--background-fill-secondary); }
.mm-bars td.mm-bar div { background: rgb(232, 119, 34); height: 14px; }
.mm-bars td.mm-bar i { position: absolute; top: 0; bottom: 0; width: 2px; }
.mm-bars td.mm-bar i { background: var(--body-text-color); }
footer { display: none !important; }
button.label-wrap { text-align: left; }
input[type=range]::-webkit-slider-thumb { background: var(--slider-color) !important; }
input[type=range]::-moz-range-thumb { background: var(--slider-color) !important; }
"""


def theme() -> gr.themes.Base:
    """Gradio's own, with the fonts of the machine: nothing is fetched from elsewhere."""
    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return gr.themes.Default(primary_hue="blue", font=sans, font_mono=mono)


_visitor: ContextVar[str] = ContextVar("visitor", default="")
"""For whom a call is answered."""


class Page(gr.Blocks):  # type: ignore[misc]  # Gradio is optional, and not seen by mypy
    """The page, which takes no path but those of the visitor's own files.

    All calls go through `process_api`, queued or not, before a file that they name is opened,
    hashed or copied.
    """

    folder: Folder

    async def process_api(self, block_fn: Any, inputs: list[Any], *rest: Any, **named: Any) -> Any:
        scope = getattr(getattr(named.get("request"), "request", None), "scope", {})
        _visitor.set(scope.get("mmdgs.visitor", ""))
        for file in files_in(inputs):
            if not self.folder.holds(_visitor.get(), str(file["path"])):
                raise gr.Error("This is no file of yours. Upload it again.", print_exception=False)
            file["url"] = None  # a path is enough, and nothing is fetched
        return await super().process_api(block_fn, inputs, *rest, **named)

    async def postprocess_data(self, *args: Any, **named: Any) -> Any:
        answer = await super().postprocess_data(*args, **named)
        for file in files_in(answer):
            self.folder.give(_visitor.get(), file["path"])
        return answer


def files_in(data: Any) -> Iterator[dict[str, Any]]:
    """Files that data name, at any depth: whatever has a path."""
    if isinstance(data, dict):
        if "path" in data:
            yield data
        data = list(data.values())
    if isinstance(data, list | tuple):
        for part in data:
            yield from files_in(part)


_accept_blobs = gr.ImageEditor.accept_blobs


def accept_blobs(editor: gr.ImageEditor, data: Any) -> None:
    """Gradio's editor would keep every painting that is sent, with as many layers as it says.

    Set on Gradio's class: a class of our own would make Gradio write a file beside this one.
    """
    if str(data.data.get("index", "null")) not in ("", "null", *map(str, range(LAYERS))):
        raise HTTPException(413, f"a painting has at most {LAYERS} layers")
    _accept_blobs(editor, data)
    while len(editor.blob_storage) > PAINTINGS:
        editor.blob_storage.pop(next(iter(editor.blob_storage)))


gr.ImageEditor.accept_blobs = server(accept_blobs)


def share_line(page: gr.Blocks) -> None:
    """Refuse requests of one browser or one address that would fill the line for all."""
    line, one_at_a_time, push = page._queue, asyncio.Lock(), page._queue.push

    async def push_own(body: Any, request: Any, username: Any) -> Any:
        async with one_at_a_time:
            queues = line.event_queue_per_concurrency_id.values()
            waiting = [event.request for queue in queues for event in queue.queue]
            visitors = [other.scope["mmdgs.visitor"] for other in waiting]
            addresses = [other.client.host for other in waiting]
            if (
                visitors.count(request.scope["mmdgs.visitor"]) >= WAITING_VISITOR
                or addresses.count(request.client.host) >= WAITING_ADDRESS
            ):
                words = "Too many of your requests wait in line; try again when some are done."
                return False, words, "queue_full"
            return await push(body=body, request=request, username=username)

    line.push = push_own


def build(folder: Folder) -> gr.Blocks:
    """The page, with all rooms."""

    def left(request: gr.Request) -> None:
        STOPS.leave(str(request.session_hash))

    with Page(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(f"# {TITLE}\n{ABOUT}")
        with gr.Tabs(elem_id="rooms"):
            for name, room in ROOMS.items():
                with gr.Tab(name, id=name.lower(), elem_id=f"room-{name.lower()}"):
                    gr.Markdown(room.ABOUT)
                    room.build(Room(name.lower(), folder), gr)
        page.unload(left)
    page.folder = folder
    page.queue(max_size=WAITING, api_open=False)
    share_line(page)
    page.state_session_capacity = VISITORS
    return page
