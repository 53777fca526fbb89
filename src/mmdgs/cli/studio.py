"""`mmdgs studio`: four rooms in the browser; and `mmdgs plane`, what its first room shows."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mmdgs.cli.app import Debug, Overwrite, Seed, app, messages, output, plain_errors, refuse_idle
from mmdgs.errors import UsageError

STUDIO_EXTRA = ("gradio", "fastapi", "uvicorn")
SHORTEST_TOKEN = 8


@app.command()
def studio(
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 7860,
    token: Annotated[str | None, typer.Option(help="Ask visitors for this token; 8 characters or more.")] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Let everybody in who reaches the address.")] = False,
    debug: Debug = False,
) -> None:
    """Open the studio: posteriors, restoration and samplers in the browser, on the models that ship."""
    with plain_errors(debug):
        try:
            import gradio  # noqa: F401
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name not in STUDIO_EXTRA:
                raise
            raise UsageError(f'this command needs {name}; install it with: pip install "mmdgs[studio]"') from error
        from mmdgs.studio.guard import is_local
        from mmdgs.studio.server import serve

        if token is not None and no_token:
            raise UsageError("--token and --no-token exclude each other; give one of the two")
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise UsageError(f"--token must have at least {SHORTEST_TOKEN} characters, got {len(token)}")
        if token is None and not no_token and not is_local(host):
            token = secrets.token_urlsafe(24)
        if token is None and not is_local(host):
            messages.print(f"note: whoever can reach {escape(host)} can use this studio; it asks for no token")
        line = "studio: [bold]{}[/bold]  (Ctrl-C ends it)"
        serve(host, port, token=token, tell=lambda address: output.print(line.format(address), soft_wrap=True))


@app.command()
def plane(
    context: typer.Context,
    density: Annotated[str, typer.Argument(help="A 2-D density: mog, rings or roll.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for a picture and arrays.")],
    sigma: Annotated[float, typer.Option(help="Standard deviation of the noise, 0.05 to 1.")] = 0.3,
    at: Annotated[str | None, typer.Option(help="x,y: a noisy point, whose posterior is shown.")] = None,
    method: Annotated[str, typer.Option(help="Of chains: exact, full, diagonal or isotropic.")] = "full",
    chains: Annotated[int | None, typer.Option(min=1, help="Run so many chains, in place of a point.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the chains.")] = 200,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Show the posterior of a noisy point of the plane beside its Gaussian approximations; or run chains there."""
    with plain_errors(debug):
        from mmdgs.files import holds_nothing, write_atomically
        from mmdgs.studio import plane as work

        if (at is None) == (chains is None):
            raise UsageError("give a noisy point (--at 0.2,0.1) or a number of chains (--chains 300), one of the two")
        refuse_idle(context, (chains is None, ("method", "steps", "seed"), "--chains"))
        holds_nothing(out, overwrite)
        if at is not None:
            seen = work.look(density, sigma, _point(at))
            files = seen.files()
            for form, value in seen.kl.items():
                output.print(f"KL to the Gaussian, {work.FORMS[form]}: {value:.4f} nats")
        else:
            mixed = work.chains(density, method, sigma, count=chains or 1, steps=steps, seed=seed)
            files = mixed.files()
            for name, share, right in mixed.shares:
                output.print(f"{name}: {100 * share:.1f}% (right: {100 * right:.1f}%)")
            output.print(f"MMD: {mixed.mmd:.4f}")
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
        output.print(f"plane: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


def _point(text: str) -> tuple[float, float]:
    try:
        x, y = (float(one) for one in text.split(","))
    except ValueError:
        raise UsageError(f"--at must be two numbers x,y, such as 0.2,0.1; got {text!r}") from None
    return x, y
