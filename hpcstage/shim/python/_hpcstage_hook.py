"""Written by `hpcstage install-hook`: lets Pythons of this environment find the shim of the `hpcstage run` that started
them, where a script has set PYTHONPATH anew. Does nothing in any other Python, and never fails one's start.
"""

# ruff: noqa: ANN202  (Python 2 has no annotations)

import os
import stat
import sys


def attach():
    # type: () -> None
    """Puts the shim's directory in front, where the interpreter finds its sitecustomize."""
    try:
        _attach()
    except Exception:
        pass


def _attach():
    # type: () -> None
    node_dir = os.environ.get("HPCSTAGE_NODE_DIR", "")
    if node_dir[:1] != "/" or os.environ.get("HPCSTAGE_DISABLE", "0") not in ("", "0"):
        return
    shim = os.path.join(node_dir, "shim")
    if any(path.endswith(shim) for path in sys.path):
        return
    for directory in (os.path.dirname(node_dir), node_dir, shim):
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o700:
            return
    sys.path.insert(0, shim)
    if "sitecustomize" in sys.modules:  # it was too late for ours
        import _hpcstage_attach  # type: ignore[import-not-found]

        _hpcstage_attach.attach(shim)
