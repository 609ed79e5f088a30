"""Answers `hpcstage checkpoint`: which checkpoints there are, whether they are whole, and brings them elsewhere.

Owns the sequence and the lines. It looks at DIR, where the drained checkpoints are plain files, and at what runs left
on the local disk of this machine for the same DIR; a login node has no such thing, and needs none.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import owner
from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource, OpenGeneration
from hpcstage.checkpoint.generations.restoring import restore, times_of
from hpcstage.checkpoint.generations.restoring import verify as verify_generation
from hpcstage.checkpoint.job.known import generations_of
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.job.plain import (
    checkpoints_in,
    copy_entries,
    damaged,
    described,
    give_newer,
    names_in,
    size_of,
)
from hpcstage.errors import HpcstageError, NoLocalDir, NoResult, UsageError
from hpcstage.node import directory, kept
from hpcstage.node.keptdirectory import target_of
from hpcstage.units import format_number, format_size
from hpcstage.upload.facts import Run
from hpcstage.upload.making import Making, sweep
from hpcstage.upload.target import Target
from hpcstage.wrapper import leftovers, outdir

if TYPE_CHECKING:
    from hpcstage.config import Config

Lines = Iterator[str]


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints of one DIR, as this machine sees them."""

    target: Path
    names: tuple[str, ...]
    opened: OpenGeneration | None
    """The generation of which the drained files are; None where no description is there."""
    places: tuple[kept.KeptPlace, ...]
    """The places that runs left, or use, on the local disk."""

    @classmethod
    def look(cls, asked: str, config: Config, cwd: Path) -> FoundCheckpoints:
        """Looks at DIR and the local disk. Raises UsageError if DIR is no directory that can be read."""
        target = Path(os.path.realpath(cwd / asked))
        try:
            names = tuple(names_in(target))
        except OSError as error:
            raise UsageError(f"{asked} cannot be read: {error.strerror}", "name the DIR of --checkpoint") from None
        return cls(target, names, described(target), tuple(_places(target, config)))

    def generations(self) -> Iterator[tuple[kept.KeptPlace, GenerationManifest | None, str]]:
        """Yields the generations on the local disk with their places; of damaged ones the reason."""
        for place in self.places:
            for found in generations_of(CheckpointPlace(place.output)):
                if isinstance(found, GenerationManifest):
                    yield place, found, ""
                else:
                    yield place, None, f"generation {found.name}: {found.why}"


def ls(found: FoundCheckpoints) -> Lines:
    """Yields what there is."""
    opened, host = found.opened, socket.gethostname()
    if opened is not None:
        made = opened.manifest
        yield f"{found.target}: generation {made.number} of {_when(made.created_ns)}"
    else:
        yield f"{found.target}: {format_number(len(found.names), 'entry', 'entries')}, not described"
    saved = {} if opened is None else times_of(opened.manifest)
    shown = checkpoints_in(found.target)
    for name in found.names:
        more = "" if name in saved else "  (not of this generation)"
        if name not in shown:
            more = "  (not shown to a run: not complete, damaged, or of a run from which no other went on)"
        yield f"  {name}  {format_size(size_of(found.target / name))}{more}"
    for place, manifest, why in found.generations():
        if manifest is None:
            yield f"{host}, run {place.run_id}: {why}"
        else:
            sizes = f"{format_size(manifest.state_bytes)} as {format_size(manifest.data_bytes)}"
            what = f"generation {manifest.number} of {_when(manifest.created_ns)}, {manifest.kind.value}, {sizes}"
            yield f"{host}, run {place.run_id}: {what}{_parities(place, manifest)}"


def verify(found: FoundCheckpoints) -> tuple[list[str], bool]:
    """Reads everything. Returns lines, and whether all that can be verified is whole. Raises NoResult if there is
    nothing to verify."""
    lines: list[str] = []
    is_whole = True
    if found.opened is not None:
        bad = damaged(found.target, found.opened)
        is_whole = not bad
        for name in times_of(found.opened.manifest):
            said = bad.get(name, "whole") if name in found.names else "it was removed"
            lines.append(f"{found.target / name}: {said}")
    for place, manifest, why in found.generations():
        where = f"{socket.gethostname()}, run {place.run_id}"
        if manifest is not None:
            why = f"generation {manifest.number} is whole"
            try:
                with LocalSource(CheckpointPlace(place.output).store) as source:
                    verify_generation(source, manifest.number)
            except HpcstageError as error:
                why, is_whole = f"generation {manifest.number}: {error.what}", False
        else:
            is_whole = False
        lines.append(f"{where}: {why}")
    if not lines:
        raise NoResult(f"{found.target} has nothing that can be verified", "checkpoints of --checkpoint DIR can be")
    return lines, is_whole


def restore_to(found: FoundCheckpoints, to: Path, number: int | None) -> str:
    """Restores a generation of the local disk, or the newest state: that of the local disk if it is newer than what was
    drained. Returns a line. Raises NoResult if there is nothing whole."""
    local = [(made, place) for place, made, _ in found.generations() if made is not None]
    if number is not None:
        local = [(made, place) for made, place in local if made.number == number]
        if not local:
            raise UsageError(f"generation {number} is not on the local disk of this machine", "see checkpoint ls")
    drained_ns = 0 if found.opened is None else found.opened.manifest.created_ns
    with making_in(to) as making:
        if number is not None:
            with LocalSource(CheckpointPlace(local[0][1].output).store) as source:
                give_newer(making, restore(source, number, making.path))
            return f"restored generation {number}, verified, to {to}"
        newest = max(local, key=lambda one: one[0].created_ns, default=None)
        if newest is not None and newest[0].created_ns > drained_ns:
            return _restore_local(newest[1], making) or _copy(found, making)
        return _copy(found, making)


@contextmanager
def making_in(to: Path) -> Iterator[Making]:
    """Owns a directory while entries are made there. Raises UsageError if another process does, and NoResult."""
    run_id, host, is_new = f"restore-{os.urandom(4).hex()}", socket.gethostname(), not os.path.lexists(to)
    try:
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = outdir.lock(os.fspath(to), os.fspath(to), f"run {run_id} on {host}")
        try:
            target = Target(Run(run_id, os.fspath(to), os.stat(to).st_ino, 0, host))
            sweep(target)
            with Making(target) as making:
                yield making
        finally:
            owner.let_go(lock)
    except BaseException as error:
        if is_new:
            with suppress(OSError):  # something was brought
                to.rmdir()
        if isinstance(error, OSError):
            raise NoResult(f"cannot copy to {to}: {error.strerror}", "name another directory") from None
        raise


def _restore_local(place: kept.KeptPlace, making: Making) -> str:
    """Restores the newest state of all nodes from what they left on this machine. Returns a line; empty if parts are
    missing."""
    from hpcstage.checkpoint.job.late import restore_here

    charter = CheckpointCharter.load(CheckpointPlace(place.output))
    number = restore_here(CheckpointPlace(place.output), charter, making)
    whose = "" if charter.is_alone else " of all nodes"
    return "" if number is None else f"restored generation {number}{whose}, verified, to {making.target.root}"


def _parities(place: kept.KeptPlace, manifest: GenerationManifest) -> str:
    """Says by which code a generation is protected, and with whom."""
    from hpcstage.checkpoint.protection.record import read_record

    with LocalSource(CheckpointPlace(place.output).store) as source:
        record = read_record(source, manifest.number)
    if record is None or record.generation != manifest.id:
        return ""
    names = ", ".join(member.name for member in record.members)
    return f", {record.code.k}+{record.code.m} with {names}"


def _copy(found: FoundCheckpoints, making: Making) -> str:
    """Copies the drained files, and verifies the copies."""
    names = checkpoints_in(found.target)
    if not names:
        raise NoResult(f"there is no checkpoint in {found.target}", "see checkpoint ls")
    to = making.target.root
    copy_entries(found.target, names, making.path)
    bad = {} if found.opened is None else damaged(making.path, found.opened)
    give_newer(making, [name for name in names if name not in bad])
    if found.opened is None:
        return f"copied {format_number(len(names), 'entry', 'entries')}, not verified, to {to}"
    if bad:
        name, why = next(iter(bad.items()))
        raise NoResult(f"{name} is not as it was saved: {why}", f"the others were copied to {to}")
    return f"restored generation {found.opened.manifest.number}, verified, to {to}"


def _places(target: Path, config: Config) -> Iterator[kept.KeptPlace]:
    host = socket.gethostname()
    try:
        local = leftovers.local_dir(config)
    except NoLocalDir:
        return
    for place in kept.places(directory.outputs_base(local, host)):
        if target_of(place) == os.fspath(target):
            yield place


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))
