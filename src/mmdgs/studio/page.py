"""The page of the studio: four rooms as tabs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.resources import files
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

CSS = files("mmdgs.studio").joinpath("page.css").read_text(encoding="utf-8")


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
        try:
            return await super().process_api(block_fn, inputs, *rest, **named)
        except gr.Error as error:  # such as a choice of a menu that has others by now
            error.print_exception = False  # the visitor is told; nothing failed here
            raise

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
