"""What the rooms' pages share: boxes for lines and commands, errors as one sentence, stop buttons, streams of work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import gradio as gr

from mmdgs.errors import first_line
from mmdgs.studio.downloads import Folder
from mmdgs.studio.sources import CUT, FITS, MOST_BYTES, MOST_PIXELS, OWN, examples, model_of, models
from mmdgs.studio.streaming import JOBS, Tell, streamed

logger = logging.getLogger("mmdgs")

T = TypeVar("T")

LINE: dict[str, Any] = {"concurrency_limit": JOBS, "concurrency_id": "compute", "show_progress": "hidden"}
"""Work that waits in the one line of the studio."""
LIGHT: dict[str, Any] = {"concurrency_limit": 4, "concurrency_id": "light", "show_progress": "hidden"}
"""Work of a moment."""
WAITING = "Waiting for a free place ..."
EXTENSIONS = [".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"]


def said(error: BaseException) -> gr.Error:
    """An error for the page: one sentence, and no traceback."""
    if not isinstance(error, ValueError | ArithmeticError | OSError | MemoryError):
        logger.error("the studio failed", exc_info=error)
    text = first_line(error)
    sentence = text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
    return gr.Error(sentence, title="This did not work", print_exception=False)


def plainly(function: Callable[..., T]) -> Callable[..., T]:
    """A handler whose errors are one sentence on the page."""
    import functools

    @functools.wraps(function)
    def handled(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except gr.Error:
            raise
        except Exception as error:
            raise said(error) from None

    return handled


class Stops:
    """What ends the work of a room for one visitor: the stop button, another click on go, or leaving the page."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], threading.Event] = {}

    def begin(self, room: str, visitor: str) -> None:
        """Work of a room is asked for: what ran there before ends."""
        self.stop(room, visitor)
        self.events[visitor, room] = threading.Event()

    def event(self, room: str, visitor: str) -> threading.Event:
        """Set once the work is to end."""
        return self.events.setdefault((visitor, room), threading.Event())

    def stop(self, room: str, visitor: str) -> None:
        self.event(room, visitor).set()

    def leave(self, visitor: str) -> None:
        """The visitor is gone, and so is all work for them."""
        for key in [key for key in self.events if key[0] == visitor]:
            self.events.pop(key).set()

    def end(self) -> None:
        """All work ends."""
        for event in list(self.events.values()):
            event.set()


STOPS = Stops()
STOPPED = "Stopped. What was made until then is shown."


def visitor_of(request: gr.Request) -> str:
    """A name for an open page."""
    return str(request.session_hash)


def told(room: str, request: gr.Request, work: Callable[[Tell[Any]], Any]) -> Iterator[Any]:
    """`streamed`, with errors for the page; it ends where the visitor stops it."""
    try:
        yield from streamed(work, STOPS.event(room, visitor_of(request)))
    except Exception as error:
        raise said(error) from None


def was_stopped(room: str, request: gr.Request) -> bool:
    """Whether the work of a room was ended before its time."""
    return STOPS.event(room, visitor_of(request)).is_set()


def runs(room: str, go: gr.Button, stop: gr.Button, status: gr.Markdown, show: Any, inputs: Any, outputs: Any) -> None:
    """Go shows what `show` yields; stop ends it, also while it waits in line. What was shown stays."""

    def begin(request: gr.Request) -> str:
        STOPS.begin(room, visitor_of(request))
        return WAITING

    def end(request: gr.Request) -> str:
        STOPS.stop(room, visitor_of(request))
        return STOPPED

    started = go.click(begin, None, status, queue=False, show_progress="hidden").then(
        show, inputs, outputs, api_name=room, **LINE
    )
    started.failure(lambda: "", None, status, queue=False, show_progress="hidden")
    stop.click(end, None, status, queue=False, show_progress="hidden")


def lines_boxes(room: str) -> tuple[gr.Code, gr.Code]:
    """Where a room shows the Python lines and the command."""
    with gr.Accordion("The same in Python and on the command line", open=False, elem_id=f"{room}-lines"):
        python = gr.Code(language="python", label="Python", interactive=False, elem_id=f"{room}-python")
        command = gr.Code(language="shell", label="Command", interactive=False, elem_id=f"{room}-command")
    return python, command


def buttons(room: str, label: str) -> tuple[gr.Button, gr.Button, gr.DownloadButton]:
    """The buttons of a room: go, stop, download."""
    go = gr.Button(label, variant="primary", elem_id=f"{room}-go")
    with gr.Row():
        stop = gr.Button("Stop", variant="stop", elem_id=f"{room}-stop", min_width=80)
        download = gr.DownloadButton("Download", interactive=False, elem_id=f"{room}-download", min_width=100)
    return go, stop, download


def ready(folder: Folder, name: str, content: bytes) -> Any:
    """The download button with a file."""
    return gr.DownloadButton(value=folder.put(name, content), interactive=True)


def status_line(room: str, text: str = "") -> gr.Markdown:
    return gr.Markdown(text, elem_id=f"{room}-status", elem_classes="mm-status")


def image_chooser(room: str, names: list[str]) -> tuple[gr.Dropdown, gr.Dropdown, gr.File, gr.Radio]:
    """Model, example, upload and how an upload is fitted."""
    with gr.Row():
        model = gr.Dropdown(
            [(f"{name} ({OWN[name]})", name) for name in names], value=names[0], label="Model", elem_id=f"{room}-model"
        )
        choices = examples(names[0])
        chosen = gr.Dropdown(choices, value=choices[0], label="Example", elem_id=f"{room}-example")
    with gr.Accordion("Your own image", open=False, elem_id=f"{room}-own"):
        file = gr.File(
            label=f"An image of at most {MOST_BYTES // 1_000_000} MB and {MOST_PIXELS // 1_000_000} million pixels",
            file_types=EXTENSIONS,
            type="filepath",
            height=110,
            elem_id=f"{room}-upload",
        )
        fit = gr.Radio(list(FITS), value=CUT, label="How it is brought to the model's size", elem_id=f"{room}-fit")
        gr.Markdown("It stays on this machine, and is deleted within half an hour. Larger images: the command.")
    return model, chosen, file, fit


def warm() -> None:
    """Load the models, so that the first click finds them there."""
    for name in models():
        model_of(name)
