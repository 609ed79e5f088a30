"""Makes the directory of a node's shim: the shim's files, its configuration, and what its self-test reads.

Owns the form of `config`, which the shim reads. The directory contains nothing but what is listed here, because the
program can import whatever lies there. On PYTHONPATH stands the directory `entry` of the installation, which puts it
in its place, and not the shim itself: see there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.plan.types import follows_samplers
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DIRECT_MODE, DaemonSpec
from hpcstage.protocol.shim import REQUEST_CAP_S

SHIM = Path(__file__).resolve().parent.parent / "shim"
PYTHON = (SHIM / "python", SHIM / "torch")
"""The directories of the shim's Python modules."""
ENTRY = SHIM / "entry"
_NATIVE = "native/_hpcstage_native*.so"
SELFTEST = b"hpcstage\n"


def native_available() -> bool:
    """Returns whether the C extension was built."""
    return sys.platform == "linux" and any(SHIM.glob(_NATIVE))


@dataclass(frozen=True)
class ShimSetup:
    """The settings of the shims of a node."""

    intercept: str
    """One of auto, native, python and off."""
    direct: bool
    """Whether opens are only counted (mode direct)."""
    request_cap_s: float = REQUEST_CAP_S
    virtual: tuple[str, int] | None = None
    """The prefix of the node directories of all virtual nodes, and their number; a process finds its own."""
    announces: bool = True
    """Whether processes run samplers ahead and announce what they will read."""

    @classmethod
    def of(cls, intercept: str, spec: DaemonSpec, virtual: tuple[str, int] | None = None) -> ShimSetup:
        """Returns the settings of the shims of a node with this daemon."""
        return cls(intercept, spec.mode == DIRECT_MODE, virtual=virtual, announces=follows_samplers(spec.order))


def install(node_dir: Path, maps: Sequence[tuple[bytes, bytes]], setup: ShimSetup, sock: Path | None = None) -> Path:
    """Makes `<node_dir>/shim` and returns it. `maps` holds (root or alias, directory in the store), `sock` is the
    socket if it is not `<node_dir>/sock`."""
    shim = node_dir / nodedir.SHIM
    shim.mkdir(mode=0o700)
    for source in (*modules(), *SHIM.glob(_NATIVE)):
        shutil.copy2(source, shim / source.name)
    _copy_bytecode(shim)
    selftest = node_dir / "selftest" / "store"
    selftest.mkdir(parents=True, mode=0o700)
    (selftest / "probe").write_bytes(SELFTEST)
    settings = _settings(node_dir, sock or node_dir / nodedir.SOCK, setup.request_cap_s)
    settings |= {"intercept": setup.intercept, "mode": "direct" if setup.direct else "stage"}
    settings |= {"announce": "yes" if setup.announces else "no"}
    if setup.virtual is not None:
        settings |= {"virtual": setup.virtual[0], "nodes": str(setup.virtual[1])}
    (shim / "config").write_bytes(_config(settings, maps))
    return shim


def modules() -> list[Path]:
    """Returns the shim's Python modules, which lie side by side in the directory on PYTHONPATH."""
    return [path for directory in PYTHON for path in sorted(directory.glob("*.py")) if path.name != "__init__.py"]


def on_path(shim: Path) -> str:
    """Returns what is put in front of PYTHONPATH."""
    return f"{ENTRY}{os.pathsep}{ENTRY}{shim}"


def off_path(entries: Sequence[str], shim: str) -> list[str]:
    """Returns the entries of a PYTHONPATH without those that `on_path` made, of any installation."""
    if not os.path.isabs(shim):
        return [*entries]
    heads = {entry.removesuffix(shim) for entry in entries if entry.endswith(shim)} - {""}
    return [entry for entry in entries if entry not in heads and not entry.endswith(shim)]


def _copy_bytecode(shim: Path) -> None:
    """Copies the bytecode, which saves each process the compilation: 3 of 25 ms with the native layer, 15 of 42 ms with
    the Python layer. It is valid since the copies of the sources keep their times."""
    (shim / "__pycache__").mkdir(mode=0o700)
    for directory in PYTHON:
        for source in directory.glob("__pycache__/*.pyc"):
            if not source.name.startswith("__init__."):
                shutil.copy2(source, shim / "__pycache__" / source.name)


def _settings(node_dir: Path, sock: Path, request_cap_s: float) -> dict[str, str | Path]:
    return {
        "version": "1",
        "node_dir": node_dir,
        "sock": sock,
        "page": node_dir / nodedir.PAGE,
        "uid": str(os.geteuid()),
        "request_cap_ms": str(round(request_cap_s * 1000)),
        "selftest_source": node_dir / "selftest" / "source",
        "selftest_store": node_dir / "selftest" / "store",
    }


def _config(settings: dict[str, str | Path], maps: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [f"{key} ".encode() + _quoted(os.fsencode(value)) for key, value in settings.items()]
    lines += [b"map " + _quoted(source) + b"\t" + _quoted(store) for source, store in maps]
    return b"".join(line + b"\n" for line in lines)


def _quoted(value: bytes) -> bytes:
    for char, code in ((b"%", b"%25"), (b"\n", b"%0A"), (b"\t", b"%09"), (b"\r", b"%0D")):
        value = value.replace(char, code)
    return value
