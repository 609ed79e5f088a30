"""A node-local disk as a job finds it: a file system that was made a moment ago.

ext4 looks for free inodes around those that were deleted in the last minutes, which costs a thousand new files more
than their data; a benchmark that deletes and copies all the time would measure that. So each sample gets a new ext4 on
a loop device, where that is permitted; elsewhere an empty directory. The device goes past the page cache of the disk
below it: keeping everything twice costs the processor about as much as copying does, and a disk does not do that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SIZE_BYTES = 16 << 30
"""Of the image, which is sparse."""
_MKFS = ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1")


class FreshDisk:
    """`renew` gives an empty local directory on a new file system."""

    def __init__(self, base: Path) -> None:
        self._image = base / "local.img"
        self.path = base / "local"
        self.is_loop = os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None

    def renew(self) -> Path:
        """What was there is gone."""
        self.end()
        self.path.mkdir()
        if self.is_loop:
            self.is_loop = self._mount()
        return self.path

    def end(self) -> None:
        """Unmounts and removes."""
        if self.path.is_mount():
            subprocess.run(["umount", self.path], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._image.exists():
            _detach(self._image)
            self._image.unlink()

    def _mount(self) -> bool:
        with self._image.open("wb") as image:
            image.truncate(SIZE_BYTES)
        device = _attach(self._image)
        if device is None:
            return False
        commands = ([*_MKFS, device], ["mount", device, os.fspath(self.path)])
        done = [subprocess.run(command, check=False, capture_output=True).returncode for command in commands]
        # From here on the device goes when it is unmounted.
        subprocess.run(["losetup", "--detach", device], check=False, stderr=subprocess.DEVNULL)
        return done == [0, 0]


def _attach(image: Path) -> str | None:
    for options in (["--direct-io=on"], []):  # not every file system below can pass its cache
        words = ["losetup", "--find", "--show", *options, os.fspath(image)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _detach(image: Path) -> None:
    """Lets go of the devices that a benchmark, ended between attaching and mounting, leaves."""
    words = ["losetup", "--associated", os.fspath(image), "--noheadings", "--output", "NAME"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    for device in done.stdout.split():
        subprocess.run(["losetup", "--detach", device], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def fresh_disk(base: Path) -> Iterator[FreshDisk]:
    """For one benchmark run."""
    disk = FreshDisk(base)
    try:
        yield disk
    finally:
        disk.end()
        unmount_below(disk.path)  # of a benchmark that was terminated, a daemon may still be at work there


def unmount_below(directory: Path) -> None:
    """What a killed run left mounted below its directory."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
    for path in mounted:
        if Path(path).is_relative_to(directory):
            subprocess.run(["umount", "-l", path], check=False, stderr=subprocess.DEVNULL)
