"""Runs at the start of every Python below `hpcstage run`: attaches the shim, then runs the sitecustomize that the
program would have had without us.

It must be harmless in any Python from 2.7 on: plain syntax, nothing printed, no failure of the shim let out.
"""

# ruff: noqa: ANN001, ANN202  (Python 2 has no annotations)

import os
import sys


def _attach(here):
    # type: (str) -> None
    if os.environ.get("HPCSTAGE_DISABLE", "0") not in ("", "0") or sys.version_info < (3, 8):
        return
    try:
        import _hpcstage_attach  # type: ignore[import-not-found]

        _hpcstage_attach.attach(here)
    except Exception:  # the program goes on without us
        pass


def _others(here):
    # type: (str) -> list[str]
    return [path for path in sys.path if os.path.abspath(path or os.curdir) != here]


def _chain(here):
    # type: (str) -> None
    if sys.version_info < (3, 4):
        _chain_old(here)
        return
    from _frozen_importlib_external import PathFinder  # importlib.machinery without what it imports

    spec = PathFinder.find_spec("sitecustomize", _others(here))
    if spec is None or spec.loader is None:
        return
    module = type(sys)("sitecustomize")
    for name, value in (("spec", spec), ("loader", spec.loader), ("file", spec.origin), ("cached", spec.cached)):
        setattr(module, "__" + name + "__", value)
    module.__package__ = ""
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _chain_old(here):
    # type: (str) -> None
    import imp  # type: ignore[import-not-found, unused-ignore]

    try:
        found = imp.find_module("sitecustomize", _others(here))
    except ImportError:
        return
    del sys.modules["sitecustomize"]
    imp.load_module("sitecustomize", *found)  # type: ignore[arg-type, unused-ignore]


_here = os.path.dirname(os.path.abspath(__file__))
_attach(_here)
_chain(_here)
