"""The wheels that are given away: for two machines, on any Linux of the last ten years."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from conftest import REPO

TOOLS = REPO / "build" / "wheels" / "bin" / "python"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""And the number of each in an ELF header."""
EXTENSIONS = {f"hpcstage/{name}.abi3.so" for name in ("shim/native/_hpcstage_native", "store/_copy", "store/_files")}
GLIBC = (2, 17)


def is_for(content: bytes, machine: str) -> bool:
    """Whether this is a 64-bit ELF file of the machine."""
    return content[:5] == b"\x7fELF\x02" and int.from_bytes(content[18:20], "little") == MACHINES[machine]


def newest_glibc(content: bytes) -> tuple[int, ...]:
    """Of all whose symbols an extension asks for by version."""
    return max(tuple(map(int, found.split(b"."))) for found in re.findall(rb"\0GLIBC_([0-9.]+)\0", content))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(not TOOLS.exists(), reason="needs the cross compiler that scripts/wheels installs below build/")
def test_the_wheels_of_both_machines(tmp_path: Path) -> None:
    command = [os.fspath(REPO / "scripts" / "wheels"), os.fspath(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for machine in MACHINES:
        (wheel,) = tmp_path.glob(f"*-abi3-manylinux2014_{machine}.*.whl")
        with zipfile.ZipFile(wheel) as content:
            libraries = {name: content.read(name) for name in content.namelist() if ".so" in name}
        assert libraries.keys() == EXTENSIONS, "no library is bundled"
        assert all(is_for(library, machine) for library in libraries.values())
        assert all(newest_glibc(library) <= GLIBC for library in libraries.values())
