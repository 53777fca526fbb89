"""The command line: parses, calls the library and shows what it returns; no mathematics inside."""

from mmdgs.cli import (  # noqa: F401  they add their commands
    bench,
    demo,
    evaluate,
    judge,
    models,
    posterior,
    restore,
    sample,
    studio,
    train,
)
from mmdgs.cli.app import app as app
