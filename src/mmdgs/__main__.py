"""The `mmdgs` command, also as `python -m mmdgs`."""

import os
from typing import Any

from mmdgs.interrupts import leave_on_interrupt


def main() -> Any:
    """Run the command line."""
    leave_on_interrupt()
    # A thread that waits for the others of a parallel loop sleeps, in place of keeping a core busy
    # that another program wants (docs/results/performance.md). OpenMP reads this once, when torch
    # is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from mmdgs.cli import app

    return app()


if __name__ == "__main__":
    main()
