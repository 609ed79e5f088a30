"""`python -m hpcstage.exchange SPEC`: the exchange of a node, started on every node by an MPI launcher."""

import sys

from hpcstage.exchange.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
