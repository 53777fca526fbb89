"""What all commands share: the application, its consoles and options, errors as one line, the
device.

No module of the command line imports torch, or what imports torch, before a command runs: help
answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from typer import Option

from mmdgs.errors import UsageError, first_line
from mmdgs.interrupts import INTERRUPTED as INTERRUPTED, raise_on_interrupt
from mmdgs.runtime import show_progress
from mmdgs.version import __version__

if TYPE_CHECKING:
    import torch

    from mmdgs.models import Model
    from mmdgs.sensors import Sensor

MISUSE, FAILURE = 2, 1


class Command(typer.core.TyperCommand):
    """A command that refuses NaN and empty texts, whichever its options are."""

    def invoke(self, ctx: Any) -> Any:
        options: list[Any] = self.params
        for option in options:
            value = ctx.params.get(option.name or "")
            if value == "" and _was_given(ctx, option):
                problem = "it must not be empty: give a value, or leave it out"
                raise typer.BadParameter(problem, ctx=ctx, param=option)
            if isinstance(value, float) and math.isnan(value):
                raise typer.BadParameter("expected a number, got nan", ctx=ctx, param=option)
        return super().invoke(ctx)


def _was_given(context: Any, option: Any) -> bool:
    """Whether an option was given on the command line, not by the environment or its default."""
    source = context.get_parameter_source(option.name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_idle(context: typer.Context, *rules: tuple[bool, Sequence[str], str]) -> None:
    """Refuse options of the command line that would change nothing.

    Each rule says whether its options are idle in this call, the names of their parameters, and
    what they are for.
    """
    for idle, names, purpose in rules:
        for option in context.command.params if idle else ():
            if option.name in names and _was_given(context, option):
                raise UsageError(f"{option.opts[0]} is for {purpose}: leave it out")


def no_sets(*sources: str | None) -> bool:
    """Whether all of the sources that are given are files or folders, and none a set that lies in
    --data-dir.
    """
    from mmdgs.data.images import NAMES

    return all(
        source is None or (source not in NAMES and Path(source).expanduser().exists())
        for source in sources
    )


class _Commands(typer.core.TyperGroup):
    """A group whose --help is False where it is not given: to read a None, typer imports pydantic
    (0.2 s).
    """

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


class App(typer.Typer):
    """An application whose commands are `Command`s with --debug, and whose errors are plain."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode="markdown",
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        register = super().command(*args, cls=Command, **options)
        return lambda function: register(_with_debug(function))


def _with_debug(function: Callable[..., None]) -> Callable[..., None]:
    """A command that ends with one line where it fails; with --debug a traceback, too."""

    @functools.wraps(function)
    def wrapped(*, debug: bool, **values: Any) -> None:
        with plain_errors(debug):
            function(**values)

    text = "Show the traceback of an error."
    option = Parameter(
        "debug",
        Parameter.KEYWORD_ONLY,
        annotation=bool,
        default=Option(False, "--debug", help=text),
    )
    own = inspect.signature(function, eval_str=True).parameters.values()
    set_parameters(wrapped, [*own, option])
    return wrapped


def set_parameters(command: Any, parameters: Sequence[Parameter]) -> None:
    """Give a function the parameters that Typer sees; keyword-only, so that their order is free."""
    free = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(free)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in free}


app = App(
    name="mmdgs",
    cls=_Commands,
    help="From a denoiser to the denoising posterior p(x | noisy x), and from it to samplers.",
)

# Off a terminal rich would assume 80 columns and break the tables.
output = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
messages = Console(stderr=True, highlight=False)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        output.print(f"mmdgs {__version__} (torch {metadata.version('torch')})")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None: ...


Out = Annotated[Path, Option("--out", "-o", help="Folder for records.json, figures, report.html.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1 ...; auto takes a GPU where there is one.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of everything random.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Start anew in a folder that is not empty.")]
Resume = Annotated[bool, Option("--resume", help="Go on from the finished parts in the folder.")]
Scaled = Annotated[
    str | None,
    Option(
        "--range",
        metavar="LOW,HIGH",
        help="Values of the files that are 0 and 1, or percentiles: 100,4095 or 0.1%,99.9%. The "
        "noise then has the units of the files.",
    ),
]
KeepClipped = Annotated[
    bool,
    Option(
        "--keep-clipped", help="Take pixels at 0 and full scale as measured, and not as bounds."
    ),
]
NOISE_HELP = (
    "Standard deviation of the noise, for values in [0, 1]; map.tif, one a pixel; estimate; "
    "poisson:GAIN[,READ[,OFFSET]]; or estimate-poisson."
)
Quiet = Annotated[
    bool,
    Option(
        "--quiet", "-q", help="Show no progress.", callback=lambda quiet: show_progress(not quiet)
    ),
]
DataDir = Annotated[Path | None, Option(help="Where data files are.", envvar="MMDGS_DATA")]
FirstN = Annotated[int | None, Option("--n", "-n", min=1, help="The first so many images.")]


@contextlib.contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Turn errors into one line and an exit status: 2 for misuse, 1 for failure."""
    # In the middle of torch's import an exception of Ctrl-C would abort the process: until then,
    # Ctrl-C leaves at once.
    import torch  # noqa: F401

    raise_on_interrupt()
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        tell("\nstopped")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = str(error) or type(error).__name__
        if isinstance(error, LookupError):  # its text is a bare name
            text = f"{type(error).__name__}: {text}"
        tell(f"[bold red]error:[/bold red] {escape(text)}")
        raise typer.Exit(MISUSE if isinstance(error, UsageError) else FAILURE) from None


def tell(text: str) -> None:
    """A message beside the results, on stderr."""
    messages.print(text, soft_wrap=True)


def show(text: str) -> None:
    """A result, on stdout."""
    output.print(text, soft_wrap=True)


def show_path(what: str, path: Path) -> None:
    """Where a result lies."""
    show(f"{what}: [bold]{escape(str(path.resolve()))}[/bold]")


def warn_of_training_images(model: Model, *sources: str | None) -> None:
    """Say in one line where images, such as celeba:test, are those the model was trained on."""
    for source in sources:
        if source is not None and model.trained_on(source):
            tell(
                f"[yellow]warning:[/yellow] {escape(model.source)} was trained on {escape(source)}:"
                " scores and intervals from these images do not hold for others"
            )


@contextlib.contextmanager
def resumable(*, advise: bool = True) -> Iterator[None]:
    """End on Ctrl-C with how to go on; where nothing is kept, or another process says it, with the
    status alone.
    """
    try:
        yield
    except KeyboardInterrupt:
        if advise:
            tell("\nstopped; to go on: the same command with [bold]--resume[/bold]")
        raise typer.Exit(INTERRUPTED) from None


def noise_named(option: str, text: str) -> float | str | Path | Sensor:
    """The value of an option that is a number, a word that asks for an estimate, the file of a map
    of deviations, or a sensor.
    """
    from mmdgs.operators import ESTIMATE
    from mmdgs.sensors import ESTIMATE_POISSON, Sensor

    if text in (ESTIMATE, ESTIMATE_POISSON):
        return text
    name, _, numbers = text.partition(":")
    try:
        if name == "poisson":
            return Sensor(*(float(number) for number in numbers.split(",", 2)))
        return float(text)
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
    if (path := Path(text).expanduser()).is_file():
        return path
    raise UsageError(
        f"{option} must be a number, {ESTIMATE}, poisson:GAIN[,READ[,OFFSET]], {ESTIMATE_POISSON}, "
        f"or the file of a map of standard deviations, got {text!r}"
    )


EXTRAS = {"report": ("matplotlib", "jinja2"), "studio": ("gradio", "fastapi", "uvicorn")}
"""The modules that `pip install "mmdgs[EXTRA]"` brings and commands need."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Say how to install the modules of an extra, where one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS[extra]:
            raise
        how = f'pip install "mmdgs[{extra}]"'
        raise UsageError(f"this command needs {name}; install it with: {how}") from error


def count_of(number: int, noun: str) -> str:
    """A number with its noun, such as "1 image" or "2,000 images"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def device_named(name: str) -> torch.device:
    """The device asked for, checked; auto: CUDA, else the CPU (Apple's MPS has no float64, which
    metrics need).
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:
        reason = first_line(error)
        raise UsageError(f"device {name!r} cannot be used ({reason}); try --device cpu") from error
    return device
