"""The page of the studio: four rooms as tabs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import gradio as gr

from mmdgs.studio import room_image, room_plane, room_restore, room_sampler
from mmdgs.studio.controls import STOPS, visitor_of
from mmdgs.studio.downloads import Folder

TITLE = "mmdgs studio"
ROOMS = {"Plane": room_plane, "Image": room_image, "Restore": room_restore, "Sampler": room_sampler}
WAITING, WAITING_ADDRESS, WAITING_VISITOR = 40, 20, 8
"""Requests that may wait in line, of all, of an address and of a browser; more are refused at once."""
VISITORS = 64
"""Open pages whose results and regions are remembered; Gradio would remember 10,000."""

CSS = """
.gradio-container { max-width: 1200px !important; }
.mm-figures { display: flex; flex-wrap: wrap; gap: 12px; }
.mm-figures figure { margin: 0; }
.mm-figures figure.mm-small { flex: 0 1 132px; }
.mm-figures figure.mm-wide { flex: 1 1 190px; max-width: 320px; }
.mm-figures img { width: 100%; image-rendering: pixelated; border-radius: 4px; display: block; }
.mm-figures figure.mm-wide img { image-rendering: auto; }
#sampler-pictures img { image-rendering: pixelated !important; }
#plane-panels .mm-figures { display: grid; grid-template-columns: repeat(2, minmax(0, 225px)); }
#plane-panels img { border: 1px solid var(--border-color-primary); }
.mm-figures figcaption { font-size: 13px; line-height: 1.3; margin-top: 4px; color: var(--body-text-color); }
#image-moved figure.mm-small { flex-basis: 200px; }
.mm-plane img { cursor: crosshair; }
.mm-status { min-height: 24px; }
.mm-bars { border-collapse: collapse; font-size: 14px; width: 100%; max-width: 560px; color: var(--body-text-color); }
.mm-bars td { padding: 3px 8px 3px 0; white-space: nowrap; border: 0; }
.mm-bars td.mm-bar { width: 60%; position: relative; background: var(--background-fill-secondary); padding: 0; }
.mm-bars td.mm-bar div { background: rgb(232, 119, 34); height: 14px; }
.mm-bars td.mm-bar i { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--body-text-color); }
footer { display: none !important; }
button.label-wrap { text-align: left; }
input[type=range]::-webkit-slider-thumb { background: var(--slider-color) !important; }
input[type=range]::-moz-range-thumb { background: var(--slider-color) !important; }
"""
SANS, MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]


def theme() -> gr.themes.Base:
    """Gradio's own, with the fonts of the machine: nothing is fetched from elsewhere."""
    return gr.themes.Default(primary_hue="blue", font=SANS, font_mono=MONO)


_visitor: ContextVar[str] = ContextVar("visitor", default="")
"""For whom a call is answered."""


class Page(gr.Blocks):  # type: ignore[misc]  # Gradio is optional, and not seen by mypy
    """The page, which takes no path but those of the visitor's own files.

    All calls go through `process_api`, queued or not, before a file that they name is opened, hashed or copied.
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


def share_line(page: gr.Blocks) -> None:
    """Refuse requests of one browser or one address that would fill the line for all."""
    line, one_at_a_time = page._queue, asyncio.Lock()
    push: Callable[..., Any] = line.push

    async def push_own(body: Any, request: Any, username: Any) -> Any:
        async with one_at_a_time:
            waiting = [event.request for queue in line.event_queue_per_concurrency_id.values() for event in queue.queue]
            by_visitor = sum(other.scope["mmdgs.visitor"] == request.scope["mmdgs.visitor"] for other in waiting)
            by_address = sum(other.client.host == request.client.host for other in waiting)
            if by_visitor >= WAITING_VISITOR or by_address >= WAITING_ADDRESS:
                return False, "Too many of your requests wait in line; try again when some are done.", "queue_full"
            return await push(body=body, request=request, username=username)

    line.push = push_own


def build(folder: Folder) -> gr.Blocks:
    """The page, with all rooms."""
    with Page(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(f"# {TITLE}\nFrom a denoiser to p(x | noisy x): what it knows, and what it invents.")
        with gr.Tabs(elem_id="rooms"):
            for name, room in ROOMS.items():
                with gr.Tab(name, id=name.lower(), elem_id=f"room-{name.lower()}"):
                    room.build(folder)
        page.unload(_left)
    page.folder = folder
    page.queue(max_size=WAITING, api_open=False)
    share_line(page)
    page.state_session_capacity = VISITORS
    return page


def _left(request: gr.Request) -> None:
    """A page was closed: its work ends."""
    STOPS.leave(visitor_of(request))
