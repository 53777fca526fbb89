"""The command line: parses, calls the library and shows what it returns; no mathematics inside."""

from mmdgs.cli import bench, convert, diagnose, evaluate, judge, models, reproduce, restore, sample, train  # noqa: F401  they add their commands
from mmdgs.cli.app import app as app
