"""Runs as `python -m hpcstage.exchange SPEC`: the exchange of a node, which an MPI launcher starts on every node."""

import sys

if __name__ == "__main__":
    from hpcstage.inherited import own_packages_first

    own_packages_first()  # before the other imports look for their modules
    from hpcstage.exchange.start import main

    sys.exit(main(sys.argv[1:]))
