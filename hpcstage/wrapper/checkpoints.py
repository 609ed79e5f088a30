"""Owns the checkpoint directory of a run: what is different there from an output directory.

The daemon puts the newest state into it before the command starts, the same on all nodes. What killed runs left on this
node for the same DIR is that state, or is older; it goes when this run's newest checkpoints are in DIR. What the nodes
bring to DIR is one state: the newest report of an agent says what became of that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.checkpoint.job.place import ALONE
from hpcstage.checkpoint.protection.groups import CodeSize, protect
from hpcstage.errors import NotStarted
from hpcstage.jsonform import read
from hpcstage.node.keptdirectory import NodeResult
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.wrapper import messages, outputpart
from hpcstage.wrapper.rundirectory import RunDirectory

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.together import Grouping
    from hpcstage.record.parts.outputs import OutputName, OutputsPart
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.outdir import NamedDirectory
    from hpcstage.wrapper.rundirectory import RunNode

_VIRTUAL = re.compile(r"\.v([0-9]+)(?:\.[a-z]+)?$")


class CheckpointDirectory(RunDirectory):
    """The directory of `--checkpoint` of one run."""

    def __init__(self, named: NamedDirectory, config: Config, job: Job, node: RunNode) -> None:
        super().__init__(named, config, job, node)
        self._said: Mapping[str, Any] = {}
        """The newest report of an agent."""

    def _terms(self, group: Grouping | None) -> dict[str, Any]:
        """See RunDirectory. Returns the charter, but for the node itself. Raises CannotProtect, with --strict."""
        config, is_alone = self._config, group is None
        asked = None if config.protect is None else CodeSize(*config.protect)
        if line := protect(self._hosts, asked, strict=config.strict).line:
            messages.warn(f"--protect {line}")
        return {
            **super()._terms(group),
            "drain_every": config.drain_every,
            "nodes": [ALONE] if is_alone else self._hosts,
            "group_dir": "" if group is None else group.directory,
            "protect": None if is_alone else config.protect,
            "protect_rate_bytes_per_s": config.protect_rate_bytes_per_s,
            "is_elastic": config.elastic is not None,
            "earlier": self._divided(len(self._hosts) if group is not None and group.virtual else 1),
        }

    def _divided(self, count: int) -> list[list[str]]:
        """Returns what earlier runs left on this machine, by the nodes of this run that are on it: virtual nodes have
        what the virtual nodes of their numbers left."""
        divided: list[list[str]] = [[] for _ in range(count)]
        for place, _ in self._earlier:
            found = _VIRTUAL.search(place.path.name)
            divided[int(found[1]) % count if found else 0].append(os.fspath(place.output))
        return divided

    def give_up(self, why: str, *, is_told: bool = True) -> None:
        """See RunDirectory. Raises NotStarted where --strict asks for a protection that there is not."""
        super().give_up(why, is_told=is_told)
        if self._config.strict and self._config.protect is not None:
            raise NotStarted(f"checkpoints are not protected: {self.part.why}", "leave --protect or --strict out")

    # ---- what became of it

    def _settled(self, results: dict[str, NodeResult | None]) -> dict[str, NodeResult | None]:
        """See RunDirectory. A node that says nothing has nothing left if the state of all nodes is in DIR."""
        said = {host: one.report for host, one in results.items() if one is not None and not one.is_late}
        if self.own is not None and (own := self.own.report()) is not None:
            said[self._hosts[0]] = own
        if len(results) > 1:
            said = {host: _brought(report, Path(self.part.directory)) for host, report in said.items()}
        self._said = max(said.values(), key=_progress, default={})
        is_whole = len(results) > 1 and _is_whole(self._said)
        if is_whole and not any(report["undrained"] for report in said.values()):
            self._tell_of_lost({*self._said["lost"], *(results.keys() - said.keys())})
        settled = dict(results)
        for host, one in results.items():
            if one is not None and not one.is_late:
                settled[host] = replace(one, report=said[host])
            elif is_whole and host not in said:
                found = one or NodeResult({}, is_late=True)
                settled[host] = replace(found, report={**found.report, "undrained": ()})
        return settled

    def _tell_of_lost(self, hosts: Collection[str]) -> None:
        drained = self._said.get("drained_number")
        for host in sorted(hosts):
            where = f"state {drained}" if drained else "all that was saved"
            messages.warn(f"{host} was lost; {where} of all nodes is in {self.part.directory}")

    def _joined(self, parts: Mapping[str, OutputsPart], results: Mapping[str, NodeResult | None]) -> OutputsPart:
        """See RunDirectory. Names are of each node, and what lies beside those of other nodes is of the job."""
        part = super()._joined(parts, results)
        if len(parts) == 1:
            return part
        job = outputpart.part_of(self._said, part)
        names = [one for one in part.names if one.fate != "beside"]
        names += (replace(one, host=_writer(one, parts)) for one in job.named("beside"))
        return replace(part, size_bytes=_copied_bytes(self._said, results), names=tuple(names))

    def tell(self, run: RunPart) -> None:
        """See RunDirectory."""
        super().tell(run)
        run.checkpoints = read(CheckpointsPart, {**self._said, "protection": self._protection()})

    def _protection(self) -> str:
        number, drained = self._said.get("protected_number"), self._said.get("drained_number")
        there = "what is in DIR" if drained is None else f"state {drained}, which is in DIR"
        if len(self._hosts) == 1:
            return f"against the loss of this node: {there}"
        nodes = f"against lost nodes: {self._said.get('protection') or 'nothing was saved'}"
        if number is not None:
            nodes = f"{nodes}; state {number}"
        return f"{nodes}. Against the loss of all: {there}"


def _brought(report: Mapping[str, Any], target: Path) -> Mapping[str, Any]:
    """Returns a report with what is in DIR by now: nodes without a connection bring their shares each by itself, and
    the last one gives the whole its names. Numbers grow over the runs of a DIR, and this run has its lock."""
    if _is_whole(report):
        return report
    from hpcstage.checkpoint.generations.restoring import times_of
    from hpcstage.checkpoint.job.plain import described

    opened = described(target)
    if opened is None or opened.manifest.number < report["saved"][-1]["number"]:
        return report
    names = times_of(opened.manifest)
    left = [one for one in report["undrained"] if one["name"] not in names]
    return {**report, "drained_number": opened.manifest.number, "undrained": left}


def _progress(report: Mapping[str, Any]) -> tuple[int, int]:
    return report.get("saved_count", 0), report.get("drained_number") or 0


def _is_whole(report: Mapping[str, Any]) -> bool:
    """Tells whether the newest state of all nodes is in DIR."""
    rows = report.get("saved", ())
    return bool(report) and (not rows or (report.get("drained_number") or 0) >= rows[-1]["number"])


def _copied_bytes(newest: Mapping[str, Any], results: Mapping[str, NodeResult | None]) -> int:
    """Returns the bytes of all copies: those of the job, of which the newest report tells, and what each other node
    brought by itself."""
    others = [one.report for one in results.values() if one is not None and one.report is not newest]
    return int(newest.get("bytes_carried", 0)) + sum(int(report.get("own_bytes", 0)) for report in others)


def _writer(one: OutputName, hosts: Collection[str]) -> str | None:
    """Returns the node whose file lies beside that of another node; None where it lies beside somebody else's."""
    return next((host for host in hosts if one.why == f"{one.name}.{host}"), None)
