"""Runs as `python -m hpcstage.exchange SPEC`: the exchange of a node, which an MPI launcher starts on every node."""

import sys

from hpcstage.exchange.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
