"""Owns the path rules of the Python layer: is this name below a dataset, and where is its copy? They are the same as in
C.

The rules are lexical only, and only where that is exact: `//` and `/./` are skipped; `..` at the front of a relative
name is taken off the working directory, which the kernel names without symbolic links; for `..` behind another
component the kernel is asked. `_hpcstage_names` resolves names that lead below a dataset only through symbolic links.
"""

from __future__ import annotations

import os

from _hpcstage_names import NameResolver  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FAR, NEAR = False, True
_open = os.open
_close = os.close
_getcwd = os.getcwd
_readlink = os.readlink
_fspath = os.fspath
_fsdecode = os.fsdecode


class DatasetName:
    """A name below a dataset: `source` is the name as the daemon knows it, `local` the place of its copy in the
    store."""

    __slots__ = ("local", "root_n", "source")

    def __init__(self, source: str, local: str, root_n: int) -> None:
        self.source = source
        self.local = local
        self.root_n = root_n

    @property
    def is_dir_name(self) -> bool:
        """Whether the name is the root, or written with a slash at the end, and so no file."""
        return self.source.endswith("/") or len(self.source) == self.root_n


class Paths:
    """The maps of this process, and whether relative names can lead below one."""

    def __init__(self, maps: list[tuple[bytes, bytes]]) -> None:
        pairs = sorted(((os.fsdecode(s), os.fsdecode(d)) for s, d in maps), key=lambda m: -len(m[0]))
        self.roots = tuple(pairs)
        """The names of the datasets, and their directories in the store."""
        self._maps = [(source + "/", len(source), store) for source, store in pairs]
        self._roots = tuple(source for source, _ in pairs)
        self.prefixes = tuple(source + "/" for source, _ in pairs)
        self.near = NEAR
        self.names = NameResolver(self._is_below)
        self._leads_outside = self.names.leads_outside
        self.cwd_changed()

    def cwd_changed(self) -> None:
        """Looks at the working directory again, after a change of directory."""
        try:
            here = self._here = _getcwd().rstrip("/") + "/"
        except OSError:
            self.near = NEAR
            return
        self.near = here.startswith(self.prefixes) or any(p.startswith(here) for p in self.prefixes)

    def copy_name(self, name: str) -> str | None:
        """Returns the place of the copy of a plainly written absolute name below a dataset: the common case, fast."""
        for prefix, n, store in self._maps:
            if name.startswith(prefix):
                return None if "//" in name or "/." in name or name[-1] == "/" else store + name[n:]
        return None

    def find(self, name: Any, dir_fd: int | None = None, how: int = 0) -> DatasetName | None:
        """Returns where a name (str, bytes, PathLike) leads, or None; anything else leads nowhere."""
        if type(name) is not str:
            name = self._text(name)
            if name is None:
                return None
        if name[:1] != "/":
            if not name:
                return None
            is_plain = name[0] != "." and "/." not in name and "//" not in name
            if dir_fd is None and not self.near and is_plain and self._leads_outside(self._here + name, how):
                return None
            name = self._absolute(name, dir_fd)
        elif name.startswith(self.prefixes):
            if "//" not in name and "/." not in name:
                return self._place(name)
        elif (
            "//" not in name
            and "/." not in name
            and not name.startswith(self._roots)
            and self._leads_outside(name, how)
        ):
            return None
        if "/.." in name:
            name = _by_kernel(name)
        name = _normal(name)
        return self._place(name) or self._place_by_links(name, how)

    def _place_by_links(self, name: str, how: int) -> DatasetName | None:
        found = self.names.resolve(name, how) if self._maps and name[1:] else None
        if found is None or "/.." in found:
            return None
        return self._place(_normal(found))

    def _is_below(self, name: str) -> bool:
        return name in self._roots or name.startswith(self.prefixes)

    def source_of(self, local: str) -> str | None:
        """Returns the source of a copy, by the copy's own name."""
        for prefix, _, store in self._maps:
            if local.startswith(store + "/"):
                return prefix[:-1] + local[len(store) :]
        return None

    def _text(self, name: Any) -> str | None:
        if isinstance(name, int) or not (isinstance(name, (str, bytes)) or hasattr(name, "__fspath__")):
            return None
        try:
            return _fsdecode(_fspath(name))
        except Exception:
            return None

    def _place(self, name: str) -> DatasetName | None:
        for prefix, n, store in self._maps:
            if name.startswith(prefix) or name == prefix[:-1]:
                return DatasetName(name, store + name[n:], n)
        return None

    def _absolute(self, name: str, dir_fd: int | None) -> str:
        try:
            base = _getcwd() if dir_fd is None else _readlink("/proc/self/fd/%d" % dir_fd)
        except (OSError, TypeError):
            return ""
        while name[:1] in (".", "/"):
            head, _, rest = name.partition("/")
            if head == "..":
                base = base.rpartition("/")[0]
            elif head not in ("", "."):
                break
            name = rest
        return base.rstrip("/") + "/" + name if base[:1] in ("", "/") else ""


def _by_kernel(name: str) -> str:
    """Returns the name with the part up to the last `..` as the kernel names it; empty if there is no such
    directory."""
    parts = name.split("/")
    if ".." not in parts:
        return name
    last = len(parts) - parts[::-1].index("..")
    try:
        fd = _open("/".join(parts[:last]), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        return "/".join([_readlink("/proc/self/fd/%d" % fd), *parts[last:]])
    except OSError:
        return ""
    finally:
        _close(fd)


def _normal(name: str) -> str:
    """Returns the name without empty and `.` components. A slash at the end stays."""
    parts = name.split("/")
    closed = parts[-1] in ("", ".")
    return "/" + "/".join([p for p in parts if p not in ("", ".")]) + ("/" if closed else "")
