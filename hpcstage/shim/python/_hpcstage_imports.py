"""Runs a module of the shim after a module of the program has been imported, and leaves no trace in that module.

The module owns one meta_path finder, which goes when nothing is awaited any more.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_awaited: dict[str, str] = {}


def after_import(name: str, ours: str) -> None:
    """Once module `name` has run, calls `patch(module)` of our module `ours`; at once if it has run already."""
    module = sys.modules.get(name)
    if module is not None:
        _patch(ours, module)
        return
    _awaited[name] = ours
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _patch(ours: str, module: Any) -> None:
    try:
        __import__(ours)
        sys.modules[ours].patch(module)
    except Exception:  # the program's import must not fail because of us
        pass


class _Finder:
    """Finds what the other finders find, with a loader that comes back to the shim after the module has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _awaited:
            return None
        ours = _awaited.pop(name)
        if not _awaited and self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _PatchingLoader(spec, ours)
                return spec
        return None


class _PatchingLoader:
    """Runs the true loader, then the patch of the shim. The module sees only the true loader."""

    def __init__(self, spec: Any, ours: str) -> None:
        self._spec = spec
        self._true = spec.loader
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)

    def create_module(self, spec: Any) -> Any:
        create = getattr(self._true, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: Any) -> None:
        self._spec.loader = self._true
        module.__loader__ = self._true
        self._true.exec_module(module)
        _patch(self._ours, module)


_finder = _Finder()
