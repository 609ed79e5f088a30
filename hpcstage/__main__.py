"""The entry point of `python -m hpcstage` and of the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    from hpcstage.inherited import hold_streams, own_packages_first

    hold_streams()
    own_packages_first()
    from hpcstage.cli.main import run
    from hpcstage.ending import end

    end(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
