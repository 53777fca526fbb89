"""`python -m mmdgs` is the `mmdgs` command."""

from mmdgs.cli import main

if __name__ == "__main__":
    main()
