"""The command line: parses, calls the library and shows what it returns; no mathematics inside."""

from typing import Any

from mmdgs.cli import bench, evaluation, experiments, models, pretrained, sampling  # noqa: F401  they add their commands
from mmdgs.cli.common import app


def main() -> Any:
    """The entry point of the `mmdgs` command."""
    return app()
