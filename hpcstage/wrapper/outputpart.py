"""Turns the result of a drain into the record's part, into lines for the user and into problems. Pure.

A report is that of an upload or of a checkpoint agent as plain data, as the daemon left it in a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcstage.node.keptdirectory import NodeResult
from hpcstage.problem import Problem
from hpcstage.record.parts.outputs import Fate, OutputName, OutputsPart
from hpcstage.units import format_number

_SHOWN = 20
"""The lines of names that are printed at most."""
_NAMED = 3
"""The names of entries that are never copied that one line has at most."""
_WITH_JOB = ", unless that was deleted with the job"
_UNSURE = "files may be missing, and files that the command removed may still be there, in"


_FATES: dict[Fate, str] = {"beside": "beside", "skipped": "skipped", "stayed": "kept"}


@dataclass(frozen=True)
class LeftAt:
    """The place of what a node could not drain."""

    machine: str
    """The machine on which a person finds it; virtual nodes have no other name to whoever logs in."""
    tree: str | None
    goes_with_job: bool = False
    """Whether that may be deleted with the job."""

    @property
    def above(self) -> Path:
        """The directory that `--local-dir` names."""
        return Path(self.tree or "").parent.parent.parent.parent


def part_of(report: Mapping[str, Any], part: OutputsPart) -> OutputsPart:
    """Returns the part with the result of a drain."""
    findings: Mapping[str, Mapping[str, str]] = report.get("findings", {})
    undrained = [OutputName(one["name"], "undrained", one["why"]) for one in report.get("undrained", ())]
    found = [*undrained, *(OutputName(name, "unclosed") for name in report.get("unclosed", ()))]
    for fate, which in _FATES.items():  # in their order: several threads found them
        found += (OutputName(name, fate, why) for name, why in sorted(findings.get(which, {}).items()))
    if report.get("is_gone"):
        found.append(OutputName("", "gone"))
    return replace(
        part,
        files=report.get("files", 0),
        size_bytes=report.get("bytes_carried", 0),
        undrained={"": len(undrained)} if undrained else {},
        names=OutputsPart.few(found),
    )


def not_drained(why: str) -> dict[str, Any]:
    """Returns the report of files that are not drained and whose names nobody knows."""
    return {"undrained": [{"name": "", "why": why}]}


def of_node(result: NodeResult | None, part: OutputsPart) -> OutputsPart:
    """Returns the part with the result of a node, or with that it did not say any. What lies beside a directory that
    was moved may hold files that were not copied, and so may one to which a program still writes."""
    if result is None:
        return part_of(not_drained("the node did not say what became of them"), part)
    part, left = part_of(result.report, part), list[OutputName]()
    if part.is_gone:
        left += (OutputName(f"../{name}", "undrained", "it was moved here unseen") for name in result.strangers)
    if result.is_written_to and not left:
        left.append(OutputName("", "undrained", "a program of the command still writes to them"))
    if part.undrained_count or not left:
        return part
    return replace(part, undrained={"": len(left)}, names=OutputsPart.few([*left, *part.names]))


def joined(parts: Mapping[str, OutputsPart]) -> OutputsPart:
    """Returns what all nodes wrote as one, by the parts of the hosts, of which the first is this node's."""
    return replace(
        next(iter(parts.values())),
        files=sum(part.files for part in parts.values()),
        size_bytes=sum(part.size_bytes for part in parts.values()),
        undrained={host: part.undrained_count for host, part in parts.items() if part.undrained_count},
        names=OutputsPart.few(replace(one, host=host) for host, part in parts.items() for one in part.names),
    )


def lines(part: OutputsPart, left: LeftAt) -> list[str]:
    """Returns the lines that say which names are not in DIR, where they still are, and what copies them."""
    shown = [f"not in {part.directory}: {one.name or 'its files'} ({one.why})" for one in part.named("undrained")]
    more = part.undrained_count - len(shown[:_SHOWN])
    if shown and more > 0:
        shown[_SHOWN:] = [f"not in {part.directory}: {more:,} more"]
    if part.undrained_count:
        until = _WITH_JOB if left.goes_with_job else ""
        shown.append(
            f"they are on {left.machine} in {left.tree}; there `{clean_command(left.above)}` copies them{until}"
        )
    elif part.is_gone:
        where = f"{left.tree} on {left.machine}"
        shown.append(f"{where} was removed or moved while it was used: {_UNSURE} {part.directory}")
    return shown


def differences(part: OutputsPart, whose: str) -> list[str]:
    """Returns the lines that name what is in DIR under another name, and what is there besides. `whose`: the command's,
    or a run's."""
    found = []
    for one in part.named("beside"):
        why = "that had been changed since" if one.host is None else "several nodes wrote it"
        found.append(f"{one.name} of {one.host or whose} is {one.why} in {part.directory}: {why}")
    stays = f"stays in {part.directory}, under that name"
    return [*found, *(f"{one.name} of {one.host or whose} {stays}: {one.why}" for one in part.named("stayed"))]


def clean_command(above: Path) -> str:
    """Returns the command that copies what is left; `above` is the directory that `--local-dir` names."""
    return f"hpcstage clean --drain --local-dir {shlex.quote(str(above))}"


def problems(part: OutputsPart, left: LeftAt, what: str, unfinished: str) -> list[Problem]:
    """Returns what the record says of files that are not in DIR under their name as the command left them; `what` they
    are. `left` is where the first of those is that were not copied, `unfinished` what is said of those that the command
    had not finished."""
    found = []
    if part.undrained_count:
        first, many = part.named("undrained")[0], format_number(part.undrained_count, what.removesuffix("s"))
        which = f"{many} not copied to {part.directory}, such as {first.name}"
        text = f"{which if first.name else f'{what} not copied to {part.directory}'}: {first.why}"
        until = _WITH_JOB if left.goes_with_job else ""
        remedy = f"hpcstage clean --drain on {left.machine}; they are in {left.tree}{until}"
        found.append(Problem("not-drained", text, remedy))
    if part.is_gone:
        text = f"{part.local_dir} was removed, moved or unmounted while it was used: {_UNSURE} {part.directory}"
        found.append(Problem("outputs-gone", text, "nothing was removed there; compare it with what is expected"))
    for one in part.named("beside")[:1]:
        text = f"somebody else changed {one.name} in {part.directory}; the run's lies there as {one.why}"
        if one.host is not None:
            text = f"several nodes wrote {one.name} in {part.directory}; that of {one.host} lies there as {one.why}"
        found.append(Problem("outputs-beside", text, "compare them; the record lists all such files"))
    for one in part.named("stayed")[:1]:
        text = f"{part.directory} still has {one.name}: {one.why}"
        found.append(
            Problem("outputs-stayed", text, "remove it there if it is not needed; the record lists all such names")
        )
    for one in part.named("unclosed")[:1]:
        text = f"{what} {unfinished}, such as {one.name}: they were copied as they were"
        why = "the command failed, or a program was killed or still ran; look at these files"
        found.append(Problem("outputs-unclosed", text, why))
    if skipped := part.named("skipped"):
        named = ", ".join(f"{one.name} ({one.why})" for one in skipped[:_NAMED])
        more = f" and {len(skipped) - _NAMED} more, which the record lists" if len(skipped) > _NAMED else ""
        found.append(
            Problem("outputs-skipped", f"not copied: {named}{more}", "FIFOs, sockets and devices are never copied")
        )
    return found
