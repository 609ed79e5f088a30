"""Stands on PYTHONPATH below `hpcstage run`, in the installation, and puts this node's shim in its place.

Jobs that a command submits inherit PYTHONPATH, go to other nodes and outlive the run; the names of its directories are
known to all by then. So nothing is imported from a directory that another user could have made there. An entry of
PYTHONPATH below this directory, which does not exist, names the shim: the rest of its path is the shim's.
"""

# ruff: noqa: ANN001, ANN202  (Python 2 has no annotations)

import os
import stat
import sys


def _is_own(directory):
    # type: (str) -> bool
    info = os.lstat(directory)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _shim(here):
    # type: (str) -> list[str]
    for path in sys.path:
        shim = path[len(here) :] if path.startswith(here + os.sep) else ""
        node_dir = os.path.dirname(shim)
        try:
            if shim and all(map(_is_own, (os.path.dirname(node_dir), node_dir, shim))):
                return [shim]
        except OSError:
            pass
    return []


def _next(here):
    # type: (str) -> None
    """Imports the sitecustomize of the shim, or the one that the program would have had without us."""
    kept = [path for path in sys.path if path != here and not path.startswith(here + os.sep)]
    own = sys.path.index(here) if here in sys.path else 0
    sys.path[:] = kept[:own] + _shim(here) + kept[own:]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


_next(os.path.dirname(os.path.abspath(__file__)))
