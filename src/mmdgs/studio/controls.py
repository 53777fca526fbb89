"""What the rooms' pages share: buttons, boxes for lines and commands, errors as one sentence, work that can be stopped.

Handlers return {component: value, or gr.update(...)}, and what is not named stays as it is.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from mmdgs.errors import first_line
from mmdgs.studio.downloads import Folder
from mmdgs.studio.sources import CUT, FITS, MOST_BYTES, MOST_PIXELS, OWN, examples, model_of, models
from mmdgs.studio.streaming import JOBS, Tell, streamed

logger = logging.getLogger("mmdgs")

Changes = dict[gr.blocks.Block, Any]
"""What a handler answers: values, or gr.update(...), for the components that change."""

LINE: dict[str, Any] = {"concurrency_limit": JOBS, "concurrency_id": "compute", "show_progress": "hidden"}
"""Work that waits in the one line of the studio."""
LIGHT: dict[str, Any] = {"concurrency_limit": 4, "concurrency_id": "light", "show_progress": "hidden"}
"""Work of a moment."""
WAITING = "Waiting for a free place ..."
WORDS = 180
"""Pixels that a list of words needs; phones show one below another."""
EXTENSIONS = [".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"]


def said(error: BaseException) -> gr.Error:
    """An error for the page: one sentence, and no traceback."""
    if not isinstance(error, ValueError | ArithmeticError | OSError | MemoryError):
        logger.error("the studio failed", exc_info=error)
    text = first_line(error)
    sentence = text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
    return gr.Error(sentence, title="This did not work", print_exception=False)


def plainly(function: Callable[..., Changes]) -> Callable[..., Changes]:
    """A handler whose errors are one sentence on the page."""

    @functools.wraps(function)
    def handled(*args: Any, **kwargs: Any) -> Changes:
        try:
            return updates(function(*args, **kwargs))
        except Exception as error:
            raise said(error) from None

    return handled


def updates(changes: Changes) -> Changes:
    """All values as updates.

    Gradio (6.31) makes a new component of a session where an output is left as it is, and keeps the one before for ever
    where the next answer is a plain value.
    """
    return {
        one: value if isinstance(value, dict) and "__type__" in value else gr.update(value=value)
        for one, value in changes.items()
    }


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


class Room:
    """What every room has: go, stop and download, a line that says how far it is, and the lines that give the same."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name, self.folder = name, folder

    def buttons(self, label: str) -> None:
        """Place the buttons."""
        self.go = gr.Button(label, variant="primary", elem_id=f"{self.name}-go")
        with gr.Row():
            self.stop = gr.Button("Stop", variant="stop", elem_id=f"{self.name}-stop", min_width=80)
            self.download = gr.DownloadButton(
                "Download", interactive=False, elem_id=f"{self.name}-download", min_width=100
            )

    def status_line(self, text: str = "") -> None:
        """Place the line that says how far the work is."""
        self.status = gr.Markdown(text, elem_id=f"{self.name}-status", elem_classes="mm-status")

    def lines_boxes(self, python: str = "", command: str = "") -> None:
        """Place the boxes of the Python lines and the command."""
        with gr.Accordion("The same in Python and on the command line", open=False, elem_id=f"{self.name}-lines"):
            self.python = gr.Code(
                python, language="python", label="Python", interactive=False, elem_id=f"{self.name}-python"
            )
            self.command = gr.Code(
                command, language="shell", label="Command", interactive=False, elem_id=f"{self.name}-command"
            )

    def lines(self, lines: tuple[str, str]) -> Changes:
        """The Python lines and the command, in their boxes."""
        return {self.python: lines[0], self.command: lines[1]}

    def starting(self) -> Changes:
        """What is shown before anything is there."""
        return {self.status: "Starting ...", self.download: gr.update(interactive=False)}

    def ready(self, name: str, content: bytes) -> Changes:
        """The download button with a file."""
        return {self.download: gr.update(value=self.folder.put(name, content), interactive=True)}

    def told(self, request: gr.Request, work: Callable[[Tell[Any]], Any]) -> Iterator[Any]:
        """What the work tells, as it comes; it ends where the visitor stops it or leaves."""
        return streamed(work, STOPS.event(self.name, visitor_of(request)))

    def runs(self, show: Callable[..., Iterator[Changes]], inputs: list[Any], outputs: list[Any]) -> None:
        """Go shows what `show` yields; stop ends it, also while it waits in line. What was shown stays.

        Another click on go ends the run before, and its own begins once that has ended.
        """

        @functools.wraps(show)
        def shown(*given: Any) -> Iterator[Changes]:
            visitor = visitor_of(next(one for one in given if isinstance(one, gr.Request)))
            stop = STOPS.event(self.name, visitor)
            try:
                for changes in show(*given):
                    yield updates(changes)
            except Exception as error:
                raise said(error) from None
            if stop.is_set():
                yield updates({self.status: STOPPED if stop is STOPS.event(self.name, visitor) else WAITING})

        def begin(request: gr.Request) -> Any:
            STOPS.begin(self.name, visitor_of(request))
            return gr.update(value=WAITING)

        def end(request: gr.Request) -> Any:
            STOPS.stop(self.name, visitor_of(request))
            return gr.update(value=STOPPED)

        own = [self.status, self.python, self.command, self.download]
        said_by = {"inputs": None, "outputs": self.status, "queue": False, "show_progress": "hidden"}
        started = self.go.click(begin, **said_by).then(
            shown, inputs, [*own, *outputs], api_name=self.name, trigger_mode="always_last", **LINE
        )
        started.failure(lambda: gr.update(value=""), **said_by)
        self.stop.click(end, **said_by)


def image_chooser(room: str, names: list[str]) -> tuple[gr.Dropdown, gr.Dropdown, gr.File, gr.Radio]:
    """Model, example, upload and how an upload is fitted."""
    with gr.Row():
        model = gr.Dropdown(
            [(f"{name} ({OWN[name]})", name) for name in names],
            value=names[0],
            label="Model",
            elem_id=f"{room}-model",
            min_width=WORDS,
        )
        choices = examples(names[0])
        chosen = gr.Dropdown(choices, value=choices[0], label="Example", elem_id=f"{room}-example", min_width=WORDS)
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
