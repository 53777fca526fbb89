"""What the rooms' controls share: values by name, go, stop and download, errors as one sentence.

Handlers return {component: value, or gr.update(...)}, and what is not named stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gradio as gr

from mmdgs.errors import UsageError, first_line
from mmdgs.studio.folder import Folder
from mmdgs.studio.pictures import VIEWER
from mmdgs.studio.sources import FITS, MODELS, MOST_BYTES, MOST_PIXELS, OWN, SHRINK, examples
from mmdgs.studio.streaming import JOBS, STOPS, Changes, Run, streamed

logger = logging.getLogger("mmdgs")

LIGHT = {"concurrency_limit": 4, "concurrency_id": "light", "show_progress": "hidden"}
"""Work of a moment; what takes longer waits in the one line of the studio."""
WAITING = "Waiting for a free place ..."
STOPPED = "Stopped. What was made until then is shown."
IDLE: dict[str, Any] = {"interactive": False, "variant": "secondary"}
BUSY: dict[str, Any] = {"interactive": True, "variant": "stop"}
"""The stop button while nothing runs, and while something does."""
WORDS = 180
"""Pixels that a list of words needs; phones show one below another."""
STAYS = "It stays on this machine, and is deleted within half an hour. Larger images: the command."
EXTENSIONS = [".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"]


def said(error: BaseException) -> gr.Error:
    """An error for the page: one sentence, and no traceback."""
    if not isinstance(error, ValueError | ArithmeticError | OSError | MemoryError):
        logger.error("the studio failed", exc_info=error)
    text = first_line(error)
    sentence = text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
    return gr.Error(sentence, title="This did not work", print_exception=False)


def updates(changes: Changes) -> Changes:
    """All values as updates.

    Gradio (6.31) makes a new component of a session where an output is left as it is, and keeps the
    one before for ever where the next answer is a plain value.
    """
    return {
        part: value if isinstance(value, dict) and "__type__" in value else gr.update(value=value)
        for part, value in changes.items()
    }


def plainly(function: Callable[..., Changes]) -> Callable[..., Changes]:
    """A handler whose errors are one sentence on the page."""

    @functools.wraps(function)
    def handled(*values: Any) -> Changes:
        try:
            return updates(function(*values))
        except Exception as error:
            raise said(error) from None

    return handled


def _examples(model: str, own: bool = False) -> dict[str, Any]:
    """The examples of a model, and the image of one's own where there is one."""
    names = [OWN] if own else examples(model)
    return {"choices": names, "value": names[0] if names else None}


class Room:
    """The components of a room, with ids ROOM-NAME; runs start from values of its `controls`."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name, self.folder = name, folder
        self.controls: dict[str, Any] = {}

    def place(self, kind: type, name: str, *args: Any, **options: Any) -> Any:
        return kind(*args, elem_id=f"{self.name}-{name}", **options)

    def control(self, kind: type, name: str, *args: Any, **options: Any) -> Any:
        """A component whose value runs are started with, under its name."""
        self.controls[name] = self.place(kind, name, *args, **options)
        return self.controls[name]

    def slider(self, name: str, label: str, *numbers: float, **options: Any) -> Any:
        """A slider from its least, most and first value, and its step where that is not 1."""
        least, most, value, step = (*numbers, 1)[:4]
        options |= {"step": step, "label": label, "min_width": WORDS}  # less cuts numbers off
        return self.control(gr.Slider, name, least, most, value, **options)

    def menu(self, name: str, label: str, choices: Mapping[str, str], **options: Any) -> Any:
        """A menu of values with their words; the first is chosen unless another is named."""
        pairs = [(words, value) for value, words in choices.items()]
        options = {"value": pairs[0][1], **options}
        return self.control(gr.Dropdown, name, pairs, label=label, **options)

    def model(self, names: list[str], **options: Any) -> Any:
        choices = {name: f"{name}: {MODELS[name]}" for name in names}
        return self.menu("model", "Model", choices, **options)

    def seed(self) -> None:
        options = {"label": "Seed", "precision": 0, "minimum": 0, "min_width": 80}
        self.control(gr.Number, "seed", 0, **options)

    def image(self, names: list[str]) -> list[Any]:
        """Model, example, upload and how an upload is fitted."""
        with gr.Row():
            model = self.model(names, min_width=WORDS)
            options = {"label": "Example", "min_width": WORDS}
            example = self.control(gr.Dropdown, "example", **_examples(names[0]), **options)
        first_is_own = not examples(names[0])
        with self.place(gr.Accordion, "own", "Your own image", open=first_is_own):
            most = f"{MOST_BYTES // 10**6} MB, {MOST_PIXELS // 10**6} million pixels"
            options = {"file_types": EXTENSIONS, "type": "filepath", "height": 170}
            upload = self.control(gr.File, "upload", label=f"At most {most}", **options)
            fit = self.control(gr.Radio, "fit", FITS, value=SHRINK, label="If it is too large")
            gr.Markdown(STAYS)
        return [model, example, upload, fit]

    def looks(
        self,
        source: list[Any],
        look: Callable[..., Changes],
        outputs: list[Any],
        others: Iterable[Any] = (),
        events: Iterable[Any] = (),
    ) -> list[Any]:
        """Answer another image by `look(*others, *source)`, and events; what comes after each.

        The source is that of `image`. An upload takes the place of the examples.
        """
        model, example, upload, fit = source

        def other(name: str, path: str | None) -> Changes:
            return {example: gr.update(**_examples(name, path is not None))}

        ends, inputs = ([model, upload], [example]), [*others, *source]
        changed = [self.on([part.change], other, *ends).then for part in (model, upload)]
        events = [*changed, fit.input, example.input, *events]
        return [self.on([event], look, inputs, outputs).then for event in events]

    def viewer(self) -> Any:
        """What is shown: figures, draws that alternate, uncertainty that fades in."""
        return self.place(gr.HTML, "pictures", js_on_load=VIEWER)

    def buttons(self, label: str) -> None:
        self.go = self.place(gr.Button, "go", label, variant="primary")
        with gr.Row():
            self.stop = self.place(gr.Button, "stop", "Stop", **IDLE, min_width=80)
            options = {"interactive": False, "min_width": 100}
            self.download = self.place(gr.DownloadButton, "download", "Download", **options)

    def status_line(self, text: str = "") -> None:
        self.status = self.place(gr.Markdown, "status", text, elem_classes="mm-status")

    def lines_boxes(self, python: str = "", command: str = "") -> None:
        title = "The same in Python and on the command line"
        with self.place(gr.Accordion, "lines", title, open=False):
            options = {"interactive": False, "language": "python", "label": "Python"}
            self.python = self.place(gr.Code, "python", python, **options)
            options |= {"language": "shell", "label": "Command"}
            self.command = self.place(gr.Code, "command", command, **options)

    def lines(self, lines: tuple[str, str] | None) -> Changes:
        """The Python lines and the command, in their boxes."""
        return {} if lines is None else {self.python: lines[0], self.command: lines[1]}

    def ready(self, name: str, content: bytes) -> Changes:
        """The download button with a file."""
        return {self.download: gr.update(value=self.folder.put(name, content), interactive=True)}

    def on(
        self, events: list[Any], function: Callable[..., Changes], *ends: Any, **more: Any
    ) -> Any:
        """Answer events by work of a moment, with inputs and outputs; returns the last listener."""
        for event in events:
            listener = event(plainly(function), *ends, **LIGHT, **more)
        return listener

    def clicks(self, picture: Any, function: Callable[..., Changes], *ends: Any) -> Any:
        """Answer a click on a picture by a function of its place (x, y), and inputs."""

        def click(event: gr.SelectData, *values: Any) -> Changes:
            return function(event.index, *values)

        return self.on([picture.select], click, *ends)

    def values(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The values of the controls by name, whole where a control has whole steps."""
        named = dict(zip(self.controls, values, strict=True))
        for name, control in self.controls.items():
            if isinstance(control, gr.Slider):
                named[name] = type(control.step)(named[name])
            elif isinstance(control, gr.Number):
                named[name] = named[name] or 0
        return named

    def announces(self, prepare: Callable[..., Run], events: list[Any]) -> None:
        """Say how long it takes what go would run, where that can be said."""

        def announce(*values: Any) -> Changes:
            words: Any = gr.update()  # an empty answer would be a value to Gradio
            with contextlib.suppress(UsageError):
                words = prepare(**self.values(values)).words
            return {self.status: words}

        self.on(events, announce, list(self.controls.values()), [self.status])

    def runs(
        self, prepare: Callable[..., Run], outputs: list[Any], events: Iterable[Any] = ()
    ) -> None:
        """Go, and other events, run what `prepare` returns for the controls' values, and show it.

        Stop ends it, also while it waits in line; what was shown stays, and can be downloaded.
        Another click on go ends the run before, and its own begins once that has ended.
        """

        def show(request: gr.Request, *values: Any) -> Iterator[Changes]:
            stop, state, failure = self.stop_of(request), None, None
            try:
                run = prepare(**self.values(values))
                yield updates({self.status: run.words, **self.lines(run.lines)})
                for state in streamed(run.work, stop):
                    changes = {self.download: gr.update(interactive=False), **run.change(state)}
                    yield updates(changes)
            except Exception as error:
                failure = error
            another = stop is not self.stop_of(request)
            changes = {} if another else {self.stop: gr.update(**IDLE)}
            if stop.is_set():
                changes[self.status] = WAITING if another else STOPPED
            if state is not None and (file := run.saved(state)):
                changes |= self.ready(*file)
            yield updates(changes)
            if failure is not None:
                raise said(failure)

        def begin(request: gr.Request) -> Any:
            STOPS.begin(self.name, str(request.session_hash))
            return gr.update(value=WAITING), gr.update(**BUSY)

        def end(request: gr.Request) -> Any:
            self.stop_of(request).set()
            return gr.update(value=STOPPED), gr.update(**IDLE)

        def fail() -> Any:
            return gr.update(value=""), gr.update(**IDLE)

        at_once = {"queue": False, "show_progress": "hidden"}
        at_once["outputs"] = [self.status, self.stop]
        line = {"concurrency_limit": JOBS, "concurrency_id": "compute", "show_progress": "hidden"}
        line |= {"api_name": self.name, "trigger_mode": "always_last"}
        inputs = list(self.controls.values())
        outputs = [self.status, self.stop, self.python, self.command, self.download, *outputs]
        for event in (self.go.click, *events):
            started = event(begin, None, **at_once).then(show, inputs, outputs, **line)
            started.failure(fail, None, **at_once)
        self.stop.click(end, None, **at_once)

    def stop_of(self, request: gr.Request) -> threading.Event:
        """What ends the work of this room for an open page."""
        return STOPS.event(self.name, str(request.session_hash))
