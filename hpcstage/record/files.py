"""Records and parts as files: atomic to write, clear about what is wrong when read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpcstage.errors import NoResult
from hpcstage.record.compose import SCHEMA_VERSION, compose
from hpcstage.record.part import NodePart, RunPart

RECORD = "run.json"
RUN_PART = "run.part.json"
MAJOR = SCHEMA_VERSION.split(".", maxsplit=1)[0]


def save(record: dict[str, Any], path: Path) -> None:
    """Writes a record: readers see the old file or the whole new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: Path) -> dict[str, Any]:
    """Reads a record; NoResult says what is wrong with it."""
    data = _read(path)
    version = data.get("schema_version")
    if not isinstance(version, str) or "time_split" not in data:
        raise NoResult(f"{path} is not a record of hpcstage", "give a run directory or its run.json")
    if version.split(".", maxsplit=1)[0] != MAJOR:
        raise NoResult(
            f"{path} has schema version {version}, this hpcstage reads {MAJOR}.x", "use the hpcstage that wrote it"
        )
    return data


def load_run(path: Path) -> dict[str, Any]:
    """The record of a run directory, or a record file; of a killed run it is composed from what its parts hold."""
    if not path.is_dir():
        return load(path)
    if (path / RECORD).exists():
        return load(path / RECORD)
    return compose(*_parts(path))


def _parts(run_dir: Path) -> tuple[RunPart, list[NodePart]]:
    nodes = [NodePart.from_json(part) for part in _readable(sorted((run_dir / "nodes").glob("*.json")))]
    if (run_dir / RUN_PART).exists():
        return _run_part(run_dir / RUN_PART), nodes
    if not nodes:
        raise NoResult(f"{run_dir} holds no record of hpcstage", "give a run directory (hpcstage-runs/RUN) or run.json")
    first = nodes[0]
    started = min(node.started_unix_s for node in nodes)
    hosts = [node.host for node in nodes]
    run = RunPart(run_dir.name, [], "", first.host, started, mode_asked=first.mode_asked, nodes=hosts)
    return run, nodes


def _run_part(path: Path) -> RunPart:
    try:
        return RunPart.from_json(_read(path))
    except TypeError as error:
        raise NoResult(f"{path} is not a part of a record", "see nodes/*.json beside it") from error


def _readable(paths: list[Path]) -> list[dict[str, Any]]:
    """Parts that can be read; others show as nodes without a report."""
    found = []
    for path in paths:
        try:
            part = _read(path)
            NodePart.from_json(part)
        except (NoResult, TypeError, ValueError, KeyError, AttributeError):
            continue
        found.append(part)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NoResult(f"{path} does not exist", "hpcstage report RUN_DIR, or run.json in it") from error
    except OSError as error:
        raise NoResult(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NoResult(
            f"{path} is not JSON, or was cut off", "give the run directory: its parts may be whole"
        ) from error
    if not isinstance(data, dict):
        raise NoResult(f"{path} is not a record of hpcstage", "give a run directory or its run.json")
    return data
