"""`python -m hpcstage.daemon SPEC`: started by the wrapper."""

from __future__ import annotations

import sys

from hpcstage.daemon.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
