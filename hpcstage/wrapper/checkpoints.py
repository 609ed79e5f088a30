"""Owns the checkpoint directory of a run: what is different there from an output directory.

The daemon puts the newest state into it before the command starts. What killed runs left on this node for the same DIR
is that state, or is older; it goes when this run's newest checkpoints are in DIR.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpcstage import extras
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace, charter_of
from hpcstage.checkpoint.protection.groups import CodeSize, protect
from hpcstage.errors import HpcstageError, NotDrained, NotStarted
from hpcstage.extras import Extra
from hpcstage.job.schedulers import domain_of
from hpcstage.jsonform import read
from hpcstage.node import kept
from hpcstage.record.parts.checkpoints import CheckpointsPart, GenerationRow
from hpcstage.wrapper import leftovers, messages, outdir, outputpart
from hpcstage.wrapper.outdir import NamedDirectory
from hpcstage.wrapper.outputs import CannotPrepare, RunNode, RunOutputs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hpcstage.config import Config
    from hpcstage.job.together import Grouping
    from hpcstage.node import kept
    from hpcstage.node.control import DaemonControl
    from hpcstage.problem import Problem
    from hpcstage.record.parts.outputs import OutputName, OutputsPart
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.leadlink import OtherNodes
    from hpcstage.wrapper.outputs import RunNode

RESTORED_S = 3600.0
"""The command waits for so long until the newest state lies in its directory; a signal ends the wait."""
_ON_ONE_NODE = "checkpoints are protected by their copies in DIR alone: one node has no other that could keep parities"
_NOT_REACHED = "the other nodes of the job are not reached"
_SILENT = "not all nodes said in time that they have the newest state"
_VIRTUAL = re.compile(r"\.v([0-9]+)(?:\.[a-z]+)?$")


class RunCheckpoints(RunOutputs):
    """The checkpoint directory of one run."""

    named: ClassVar[NamedDirectory] = outdir.CHECKPOINT
    spec_key: ClassVar[str] = "checkpoints"
    name_suffix: ClassVar[str] = kept.OF_CHECKPOINTS
    watched_s: ClassVar[float] = RESTORED_S

    def __init__(
        self, target: str, lock: int | None, why: str, kept_at: tuple[kept.KeptPlace, kept.KeptLock] | None
    ) -> None:
        super().__init__(target, lock, why, kept_at)
        self._earlier: list[tuple[kept.KeptPlace, kept.KeptLock]] = []
        """Places of killed runs with the same DIR, and their exclusive locks."""
        self._said: dict[str, Any] = {}

    def tell(self, run: RunPart) -> None:
        """See RunOutputs."""
        saved = tuple(read(GenerationRow, row) for row in self._said.get("saved", ()))
        run.checkpoints = CheckpointsPart(
            drain=self.part,
            protection=self._protection(),
            restored=self._said.get("restored", ""),
            restored_s=self._said.get("restored_s", 0.0),
            saved_count=self._said.get("saved_count", 0),
            saved=saved,
            saving_s=round(sum(row.took_s for row in saved), 6),
            drained_number=self._said.get("drained_number"),
            refused=tuple(self._said.get("refused", ())),
            lost=tuple(self._said.get("lost", ())),
        )

    def give_up(self, why: str) -> None:
        """See RunOutputs. What killed runs left is copied to DIR first, where the command looks for it."""
        if self.place is not None:
            for earlier, lock in self._earlier:
                with suppress(HpcstageError):  # a signal came
                    leftovers.drain(earlier, lock, RESTORED_S, owning=self.place.run_id)
        super().give_up(why)

    def _prepare(self, place: kept.KeptPlace, node: RunNode, config: Config) -> None:
        if (missing := extras.missing(Extra.CHECKPOINT, *extras.OF_CHECKPOINTS)) is not None:
            raise CannotPrepare(missing.line())
        above = place.path.parent
        self._earlier = leftovers.take_checkpoints(above, self.part.directory)  # the start named them
        local = CheckpointPlace(place.output)
        try:
            local.base.mkdir(0o700)
            local.tree.mkdir(0o700)
            self._charter(local, node, config)
        except OSError as error:
            raise CannotPrepare(f"{error.filename}: {error.strerror}") from None

    def _charter(self, local: CheckpointPlace, node: RunNode, config: Config) -> None:
        """Writes the charter. Raises OSError."""
        if config.protect is not None:
            messages.warn(f"--protect {config.protect[0]}+{config.protect[1]}: {_ON_ONE_NODE}")
        target = self.part.directory
        bases = tuple(os.fspath(one.output) for one, _ in self._earlier)
        CheckpointCharter(node.run_id, target, os.stat(target).st_ino, config.drain_every, bases).save(local)

    def _collect(self, place: kept.KeptPlace) -> None:
        self._said = self._report(place) or {}
        super()._collect(place)
        if not self.exit_code:
            for earlier, lock in self._earlier:
                with suppress(HpcstageError):  # a signal came
                    leftovers.drain(earlier, lock, leftovers.AT_START_S, owning=place.run_id)

    def _close(self) -> None:
        super()._close()
        for _, lock in self._earlier:
            lock.let_go()
        self._earlier = []

    def _protection(self) -> str:
        if self.place is None or self._said.get("drained_number") is None:
            return "against the loss of this node: what is in DIR"
        return f"against the loss of this node: state {self._said['drained_number']}, which is in DIR"


def refuse_protection(config: Config, why_not: str) -> None:
    """Raises NotStarted where --strict asks for a protection that one node cannot give; `why_not` is why its wrapper
    does not keep the checkpoints of the job's nodes, if that is so."""
    if config.strict and config.checkpoint is not None and config.protect is not None:
        asked = f"--protect {config.protect[0]}+{config.protect[1]}"
        if why_not:
            raise NotStarted(f"{asked}: checkpoints are not protected: {why_not}", "leave --protect or --strict out")
        raise NotStarted(f"{asked}: {_ON_ONE_NODE}", "leave it out")


class SharedCheckpoints(RunCheckpoints):
    """The checkpoint directories of one run on several nodes."""

    def __init__(
        self, target: str, lock: int | None, why: str, kept_at: tuple[kept.KeptPlace, kept.KeptLock] | None
    ) -> None:
        super().__init__(target, lock, why, kept_at)
        self._others: OtherNodes | None = None
        self._told: dict[str, Any] = {}
        self._hosts: list[str] = []
        self._needs_protection = False

    @classmethod
    def _why_not(cls, node: RunNode) -> str:
        return node.why_not

    def _charter(self, local: CheckpointPlace, node: RunNode, config: Config) -> None:
        del local, config  # the nodes are not known yet
        self._told = {"run_id": node.run_id}

    def join(self, group: Grouping, config: Config) -> None:
        """See RunOutputs. Raises CannotProtect, with --strict."""
        self._hosts = list(group.hosts)
        self._needs_protection = config.strict and config.protect is not None
        asked = None if config.protect is None else CodeSize(*config.protect)
        plan = protect(group.hosts, asked, strict=config.strict)
        if self.place is None:
            self._require_kept()
            return
        if plan.line:
            messages.warn(f"checkpoints: {plan.line}")
        target = self.part.directory
        self._told |= {
            "target": target,
            "target_inode": os.stat(target).st_ino,
            "drain_every": config.drain_every,
            "nodes": self._hosts,
            "group_dir": group.directory,
            "protect": config.protect,
            "protect_rate_bytes_per_s": config.protect_rate_bytes_per_s,
            "is_elastic": config.elastic is not None,
            "earlier": self._divided(len(self._hosts) if group.virtual else 1),
        }
        own = charter_of(self._told, self._hosts[0], self._told["earlier"][0], domain_of(os.environ))
        own.save(CheckpointPlace(self.place.output))

    def _divided(self, count: int) -> list[list[str]]:
        """Returns what earlier runs left on this machine, by the nodes of this run that are on it: virtual nodes have
        what the virtual nodes of their numbers left."""
        divided: list[list[str]] = [[] for _ in range(count)]
        for place, _ in self._earlier:
            found = _VIRTUAL.search(place.path.name)
            divided[int(found[1]) % count if found else 0].append(os.fspath(place.output))
        return divided

    def _require_kept(self) -> None:
        """Raises NotStarted where --strict asks for a protection that there is not."""
        if self._needs_protection:
            raise NotStarted(f"checkpoints are not protected: {self.part.why}", "leave --protect or --strict out")

    def give_up(self, why: str) -> None:
        """See RunOutputs."""
        super().give_up(why)
        self._require_kept()

    def in_lead(self) -> dict[str, Any]:
        """See RunOutputs."""
        return {"checkpoint": self._told} if self.place is not None else {}

    def meet(self, others: OtherNodes) -> None:
        """See RunOutputs."""
        self._others = others

    def is_watched(self, control: DaemonControl, timeout_s: float) -> bool:
        """See RunOutputs. All nodes have to have the newest state, and the own one has it only with the others."""
        self._since = self._since or time.monotonic()
        if self.place is not None:
            why = _NOT_REACHED if self._others is None else self._others.lead.unkept_why(0.0)
            if why is None and time.monotonic() > self._since + self.watched_s:
                why = _SILENT
            if why:
                self.give_up(why)
            elif why is None:
                super().is_watched(control, timeout_s)
                return self.place is None
        return super().is_watched(control, timeout_s)

    def end(self, *, is_orderly: bool) -> bool:
        """See RunOutputs."""
        self._ask()
        return super().end(is_orderly=is_orderly)

    def before_end(self) -> None:
        """See RunOutputs."""
        self._ask()

    def _ask(self) -> None:
        if self._others is not None:
            self._others.lead.ask_drain()

    def is_drained(self, timeout_s: float, *, is_answered: bool) -> bool:
        """See RunOutputs. What this node's checkpoint agent did not drain is drained when the others are done."""
        if self.place is not None and self._others is not None and not self._others.lead.drained(timeout_s):
            self._tell()
            return False
        return super().is_drained(timeout_s, is_answered=is_answered)

    # ---- what became of it

    def collect(self) -> list[Problem]:
        """See RunOutputs."""
        problems = super().collect()
        if self._others is not None:
            self._others.forget_checkpoints()
        return problems

    def _collect(self, place: kept.KeptPlace) -> None:
        reports = self._reports(place)
        newest = max(reports.values(), key=_progress, default={})
        is_whole = _is_whole(newest)
        super()._collect(place)
        self._said = newest
        parts = {self._hosts[0]: self.part}
        for host in self._hosts[1:]:
            parts[host] = self._part_of(host, reports.get(host), is_whole=is_whole)
        for host in sorted(set(newest.get("lost", ())) | (set(self._hosts) - reports.keys())):
            if is_whole and not any(report["undrained"] for report in reports.values()):
                where = f"state {newest['drained_number']}" if newest.get("drained_number") else "all that was saved"
                messages.warn(f"{host} was lost; {where} of all nodes is in {self.part.directory}")
        self.part = _joined(parts, newest, self.part)

    def _reports(self, place: kept.KeptPlace) -> dict[str, dict[str, Any]]:
        found = {self._hosts[0]: self._report(place) or {}}
        if self._others is not None:
            said = {host: self._others.checkpoints_of(host).get("report", {}) for host in self._hosts[1:]}
            found |= {host: self._brought(report) for host, report in said.items()}
        return {host: report for host, report in found.items() if report}

    def _report(self, place: kept.KeptPlace) -> dict[str, Any] | None:
        report = super()._report(place)
        return None if report is None else self._brought(report)

    def _brought(self, report: dict[str, Any]) -> dict[str, Any]:
        """Returns a report with what is in DIR by now: nodes without a connection bring their shares each by itself,
        and the last one gives the whole its names. Numbers grow over the runs of a DIR, and this run has its lock."""
        if _is_whole(report) or not report:
            return report
        from hpcstage.checkpoint.generations.restoring import times_of
        from hpcstage.checkpoint.job.plain import described

        opened = described(Path(self.part.directory))
        if opened is None or opened.manifest.number < report["saved"][-1]["number"]:
            return report
        names = times_of(opened.manifest)
        left = [one for one in report["undrained"] if one["name"] not in names]
        return {**report, "drained_number": opened.manifest.number, "undrained": left}

    def _result(self, place: kept.KeptPlace) -> OutputsPart:
        part = super()._result(place)
        if (
            part.undrained_count
            and self._report(place) is None
            and _is_whole(max(self._reports(place).values(), key=_progress, default={}))
        ):
            return replace(part, undrained_count=0, names=tuple(one for one in part.names if one.fate != "undrained"))
        return part

    def _left_at(self, host: str | None) -> outputpart.LeftAt:
        if host is None or self._others is None or host not in self._others.places:
            return super()._left_at(host)
        return self._others.left_at(host, self.name_suffix)

    def _part_of(self, host: str, report: dict[str, Any] | None, *, is_whole: bool) -> OutputsPart:
        directory = Path(self._others.places[host]) if self._others is not None else Path()
        place = directory.with_name(f"{directory.name}{self.name_suffix}")
        part = replace(self.part, local_dir=f"{place}/out/tree", undrained_count=0, names=())
        if report:
            part = outputpart.part_of(report, part)
        elif not is_whole:
            part = outputpart.unknown(part, "the node did not say what became of them")
        machine, above = self._left_at(host).machine, place.parent.parent
        for line in outputpart.lines(part, machine, above, goes_with_job=self.goes_with_job):
            messages.error(line)
        if part.undrained_count:
            self.exit_code = NotDrained.exit_code
        return part

    def _protection(self) -> str:
        said = self._said
        number, drained = said.get("protected_number"), said.get("drained_number")
        nodes = f"against lost nodes: {said.get('protection') or 'nothing was saved'}"
        if number is not None:
            nodes = f"{nodes}; state {number}"
        there = "what is in DIR" if drained is None else f"state {drained}, which is in DIR"
        return f"{nodes}. Against the loss of all: {there}"


def _progress(report: Mapping[str, Any]) -> tuple[int, int]:
    return report.get("saved_count", 0), report.get("drained_number") or 0


def _is_whole(report: Mapping[str, Any]) -> bool:
    """Tells whether the newest state of all nodes is in DIR."""
    rows = report.get("saved", ())
    return bool(report) and (not rows or (report.get("drained_number") or 0) >= rows[-1]["number"])


def _joined(parts: Mapping[str, OutputsPart], newest: Mapping[str, Any], own: OutputsPart) -> OutputsPart:
    """Returns what became of the checkpoints of all nodes: counts are of the job, names of each node."""
    part = outputpart.joined(parts)
    job = outputpart.part_of(newest, own)
    names = [one for one in part.names if one.fate != "beside"]
    names += (replace(one, host=_writer(one, parts)) for one in job.named("beside"))
    return replace(part, files=job.files, size_bytes=job.size_bytes, names=tuple(names))


def _writer(one: OutputName, hosts: Collection[str]) -> str | None:
    """Returns the node whose file lies beside that of another node; None where it lies beside somebody else's."""
    return next((host for host in hosts if one.why == f"{one.name}.{host}"), None)
