"""Writes records atomically and reads records and parts; an error says what is wrong with the file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcstage.errors import NoResult
from hpcstage.jsonform import read
from hpcstage.protocol.rundir import NODES, PART, RECORD
from hpcstage.record.compose import compose
from hpcstage.record.parts import alive
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import VERSION, Record
from hpcstage.writing import replacing

GIVE = "give a run directory or its run.json"


def save(record: Record, path: Path) -> None:
    """Writes a record so that readers see the old file or the whole new one. Raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(record.to_json(), indent=1, allow_nan=False).encode())
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> Record:
    """Reads a record; NoResult says what is wrong with it."""
    data = _read(path)
    version = data.get("schema_version")
    if not isinstance(version, str) or "time_split" not in data:
        raise NoResult(f"{path} is not a record of hpcstage", GIVE)
    if version != VERSION:
        raise NoResult(
            f"{path} has schema version {version}, this hpcstage reads {VERSION}", "use the hpcstage that wrote it"
        )
    try:
        return Record.from_json(data)
    except ValueError as error:
        raise NoResult(f"cannot read the record {path}", "use the hpcstage that wrote it") from error


def load_run(path: Path) -> Record:
    """Reads the record of a run directory or a record file; composes that of a killed run from its parts."""
    if not path.is_dir():
        return load(path)
    record = load(path / RECORD) if (path / RECORD).exists() else None
    return _composed(path) if record is None or _is_late(record, path) else record


def _composed(run_dir: Path) -> Record:
    run = _run(run_dir)
    return compose(run, node_parts(run_dir), running=alive.evidence(run, run_dir))


def node_parts(run_dir: Path) -> Iterator[NodePart]:
    """Yields the nodes' parts one after the other. A node whose part cannot be read shows as one without a report."""
    for path in _part_paths(run_dir):
        with contextlib.suppress(NoResult, TypeError, ValueError, KeyError, AttributeError):
            yield NodePart.from_json(_read(path))


def _part_paths(run_dir: Path) -> list[Path]:
    return sorted((run_dir / NODES).glob("*.json"))


def _is_late(record: Record, run_dir: Path) -> bool:
    """Returns whether the parts are of a later run into the same directory, or a node of several wrote its part after
    the record was written, so that the record lacks it."""
    with contextlib.suppress(NoResult, OSError):
        if run_part(run_dir).started_unix_s > record.run.started_unix_s:
            return True
        if not record.complete and record.group:
            written_ns = (run_dir / RECORD).stat().st_mtime_ns
            return any(path.stat().st_mtime_ns > written_ns for path in _part_paths(run_dir))
    return False


def _run(path: Path) -> RunPart:
    if (path / PART).exists():
        return run_part(path)
    heads = [(node.host, node.started_unix_s, node.mode) for node in node_parts(path)]
    if not heads:
        raise NoResult(f"{path} holds no record of hpcstage", "give a run directory (hpcstage-runs/RUN) or run.json")
    host, started_unix_s, mode = min(heads, key=lambda head: head[1])
    return RunPart(path.name, [], host, started_unix_s, mode_asked=mode, nodes=[head[0] for head in heads])


def run_part(run_dir: Path) -> RunPart:
    """Reads the wrapper's part of a run; NoResult says what is wrong with it."""
    path = run_dir / PART
    try:
        return read(RunPart, _read(path))
    except ValueError as error:
        raise NoResult(f"{path} is not a part of a record", "see nodes/*.json beside it") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes(), parse_constant=_no_number)
    except FileNotFoundError as error:
        raise NoResult(f"{path} does not exist", "hpcstage report RUN_DIR, or run.json in it") from error
    except OSError as error:
        raise NoResult(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NoResult(
            f"{path} is not JSON, or was cut off", "give the run directory: its parts may be whole"
        ) from error
    if not isinstance(data, dict):
        raise NoResult(f"{path} is not a record of hpcstage", GIVE)
    return data


def _no_number(text: str) -> float:
    """Rejects NaN and Infinity: JSON does not have them, and hpcstage writes neither."""
    raise ValueError(f"{text} is not a number")
