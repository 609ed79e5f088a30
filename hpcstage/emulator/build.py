"""Builds the emulator's server once per version of its source and keeps it in the user's cache directory.

The module owns the compiler's command line and the place of the result. It does not own mounts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hpcstage.errors import HpcstageError

SOURCE = Path(__file__).with_name("slowfs.c")
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
_BUILD_TIMEOUT_S = 60.0


class EmulatorUnavailable(HpcstageError):
    """This machine cannot build or mount the emulator; the remedy names what is missing."""


def unavailable() -> str | None:
    """Returns why this machine cannot run the emulator, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    if os.geteuid() != 0 and not shutil.which("fusermount3"):
        return "fusermount3 is missing (package fuse3)"
    if _binary().exists():
        return None
    if not shutil.which(_compiler()):
        return "no C compiler"
    return None if _fuse_flags() is not None else "libfuse 3 for C is missing (package libfuse3-dev, with pkg-config)"


def build() -> Path:
    """Returns the server's executable, compiled if this source has not been compiled before."""
    binary = _binary()
    if binary.exists():
        return binary
    flags = _fuse_flags()
    if flags is None or not shutil.which(_compiler()):
        raise EmulatorUnavailable("the slow-storage emulator cannot be built", unavailable() or "")
    compile_c(SOURCE, binary, flags)
    return binary


def compile_c(source: Path, binary: Path, flags: list[str]) -> None:
    """Compiles one C file; `binary` appears whole or not at all, also beside another process that builds it."""
    binary.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=binary.parent, prefix="build-") as scratch:
        output = Path(scratch) / binary.name
        command = [_compiler(), *_FLAGS, "-o", str(output), str(source), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
        if done.returncode:
            raise EmulatorUnavailable(f"cannot compile {source.name}: {done.stderr.strip()[-500:]}")
        output.replace(binary)


def cached_binary(source: Path) -> Path:
    """Returns where the executable of a C file is kept: outside the package, named after the content of the C file."""
    digest = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "hpcstage" / "emulator" / f"{source.stem}-{digest}"


def _binary() -> Path:
    return cached_binary(SOURCE)


def _compiler() -> str:
    return os.environ.get("CC") or "cc"


def _fuse_flags() -> list[str] | None:
    command = ["pkg-config", "--cflags", "--libs", "fuse3"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except OSError:
        return None
    return done.stdout.split() if done.returncode == 0 else None
