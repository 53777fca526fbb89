"""`mmdgs studio`: four rooms in the browser; and `mmdgs plane`, what its first room shows."""

from __future__ import annotations

import secrets
from pathlib import Path

from rich.markup import escape
from typer import Argument, Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import Overwrite, Seed, app
from mmdgs.errors import UsageError

SHORTEST_TOKEN = 8


@app.command()
def studio(
    host: str = Option("127.0.0.1", help="Address to listen at; 0.0.0.0 lets other machines in."),
    port: int = Option(7860, min=0, max=65535, help="Port to listen at; 0 takes a free one."),
    token: str | None = Option(None, help="Ask visitors for this token; 8 characters or more."),
    no_token: bool = Option(False, "--no-token", help="Let everybody in who reaches the address."),
) -> None:
    """Open the studio: posteriors, restoration and samplers in the browser, on the models that
    ship.
    """
    with cli.needs("studio"):
        import gradio  # noqa: F401
    from mmdgs.studio.server import is_local, serve

    if token is not None and no_token:
        raise UsageError("--token and --no-token exclude each other; give one of the two")
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UsageError(f"--token must have {SHORTEST_TOKEN} characters or more, got {len(token)}")
    if token is None and not is_local(host):
        if no_token:
            who = f"whoever can reach {escape(host)} can use this studio"
            cli.tell(f"note: {who}; it asks for no token")
        else:
            token = secrets.token_urlsafe(24)

    def tell(address: str) -> None:
        cli.show(f"studio: [bold]{address}[/bold]  (Ctrl-C ends it)")

    serve(host, port, token=token, tell=tell)


@app.command()
def plane(
    context: Context,
    density: str = Argument(help="A 2-D density: mog, rings or roll."),
    out: Path = Option(..., "--out", "-o", help="Folder for a picture and arrays."),
    sigma: float = Option(0.3, help="Standard deviation of the noise, 0.05 to 1."),
    at: str | None = Option(None, help="x,y: a noisy point, whose posterior is shown."),
    method: str = Option("full", help="Of chains: exact, full, diagonal or isotropic."),
    chains: int | None = Option(None, min=1, help="Run so many chains, in place of a point."),
    steps: int = Option(200, min=1, help="Steps of the chains."),
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Show the posterior of a noisy point of the plane beside its Gaussian approximations; or run
    chains there.
    """
    from mmdgs.files import holds_nothing, write_atomically
    from mmdgs.studio.folder import encoded
    from mmdgs.studio.plane import FORMS, look, run_chains

    if (at is None) == (chains is None):
        ways = "a noisy point (--at 0.2,0.1) or a number of chains (--chains 300)"
        raise UsageError(f"give {ways}, one of the two")
    cli.refuse_idle(context, (chains is None, ("method", "steps", "seed"), "--chains"))
    holds_nothing(out, overwrite)
    if at is not None:
        posterior = look(density, sigma, _point(at))
        files = posterior.files()
        for form, value in posterior.kl.items():
            cli.show(f"KL to the Gaussian, {FORMS[form]}: {value:.4f} nats")
    else:
        state = run_chains(density, sigma, method, chains or 1, steps, seed)
        files = state.files()
        for name, share, right in state.shares:
            cli.show(f"{name}: {100 * share:.1f}% (right: {100 * right:.1f}%)")
        cli.show(f"MMD: {state.mmd:.4f}")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, encoded(name, content))
    cli.show_path("plane", out)


def _point(text: str) -> tuple[float, float]:
    try:
        x, y = (float(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"--at must be two numbers x,y, such as 0.2,0.1; got {text!r}") from None
    return x, y
