"""The ready-made scale policies, and what makes one of the user's text. Each is pure: it answers from the facts alone,
so any host may ask it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcstage.elastic.policy import Answer, AskedPolicy, Cause, Host, PolicyError, Progress, ScalePolicy
from hpcstage.errors import UsageError
from hpcstage.units import parse_duration

_START = Cause()


class FailStop(ScalePolicy):
    """Trains on exactly `n` hosts and fails when one is lost. Further hosts are spares that are not used."""

    def __init__(self, n: int) -> None:
        self.n = _at_least_one("n", n)

    def ok2run(self, hosts: Sequence[Host], initial: bool, **_facts: object) -> Answer:
        """Returns `ok` for `n` hosts, before that `wait`, after that `fail`."""
        if len(hosts) == self.n:
            return "ok"
        return "wait" if initial else "fail"

    def most(self, hosts: Sequence[Host]) -> int:
        """Returns `n`."""
        return min(self.n, len(hosts))


class MinMax(ScalePolicy):
    """Trains on `lo` to `hi` hosts. With fewer it waits at the start, and fails later. If hosts are lost and those
    that are left cannot go on from any state, it waits for one that can."""

    def __init__(self, lo: int, hi: int) -> None:
        self.lo, self.hi = _range("hosts", lo, hi)

    def ok2run(
        self,
        hosts: Sequence[Host],
        initial: bool,
        *,
        cause: Cause = _START,
        recoverable: bool | None = None,
        **_facts: object,
    ) -> Answer:
        """Returns `ok` for `lo` to `hi` hosts."""
        if len(hosts) < self.lo:
            return "wait" if initial else "fail"
        return "wait" if len(hosts) > self.hi or (recoverable is False and cause.kind == "loss") else "ok"

    def most(self, hosts: Sequence[Host]) -> int:
        """Returns `hi`."""
        return min(self.hi, len(hosts))


class WaitFor(ScalePolicy):
    """Trains on `n` hosts or more, and waits up to `timeout` for the n-th, at the start as after a loss; then it fails.
    Hosts that join are collected for `timeout` from the first of them, and taken together."""

    def __init__(self, n: int, timeout: float | str = 60) -> None:
        self.n = _at_least_one("n", n)
        self.timeout_s = _duration(timeout)

    def ok2run(self, hosts: Sequence[Host], _initial: bool, *, cause: Cause, **_facts: object) -> Answer:
        """Returns `ok` for `n` hosts, if they are not still being collected."""
        is_over = cause.waited_s >= self.timeout_s
        if len(hosts) < self.n:
            return "fail" if is_over else "wait"
        return "wait" if cause.kind == "join" and not is_over else "ok"


class KeepBatch(ScalePolicy):
    """Trains while the global batch is `lo` to `hi` samples. What one process takes is `per_process`, or what the
    training says of itself. With fewer it waits at the start, and fails later."""

    def __init__(self, lo: int, hi: int, per_process: int | None = None) -> None:
        self.lo, self.hi = _range("samples", lo, hi)
        self.per_process = None if per_process is None else _at_least_one("per_process", per_process)

    def ok2run(self, hosts: Sequence[Host], initial: bool, *, progress: Progress, **_facts: object) -> Answer:
        """Returns `ok` if the global batch of these hosts is in the range."""
        per_process = self.per_process or progress.batch_per_process
        if per_process is None:
            raise ValueError("nobody says the batch of one process: give it as third number")
        batch = per_process * sum(host.processes for host in hosts)
        if batch < self.lo:
            return "wait" if initial else "fail"
        return "ok" if batch <= self.hi else "wait"

    def most(self, hosts: Sequence[Host]) -> int:
        """Returns how many hosts fit below `hi`, if `per_process` is known."""
        if self.per_process is None:
            return len(hosts)
        batch = 0
        for count, host in enumerate(hosts):
            batch += self.per_process * host.processes
            if batch > self.hi:
                return count
        return len(hosts)


class FinishIfNear(ScalePolicy):
    """Goes on with what is left after a loss if `share` of the training is done, and fails before that: it is then
    cheaper to begin again. Hosts that join are always taken."""

    def __init__(self, share: float = 0.8) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share should be from 0 to 1, not {share}")
        self.share = share

    def ok2run(self, hosts: Sequence[Host], initial: bool, *, progress: Progress, **_facts: object) -> Answer:
        """Returns `ok` unless hosts are missing too early."""
        if initial or len(hosts) >= (progress.hosts_at_start or 0):
            return "ok"
        return "ok" if progress.share is not None and progress.share >= self.share else "fail"


class TimeLeft(ScalePolicy):
    """Goes on while the rest of the training is expected to fit in the job's time. If not, it waits up to `wait` for
    more hosts, and then fails. Where the time or the rest is not known, it goes on."""

    def __init__(self, wait: float | str = 0) -> None:
        self.wait_s = _duration(wait)

    def ok2run(
        self,
        hosts: Sequence[Host],
        initial: bool,
        *,
        cause: Cause,
        progress: Progress,
        time_left: float | None,
        **_facts: object,
    ) -> Answer:
        """Returns `ok` if these hosts would be done in time."""
        if initial or time_left is None or progress.process_s_left is None:
            return "ok"
        if progress.process_s_left / sum(host.processes for host in hosts) <= time_left:
            return "ok"
        # More hosts help even if they are not enough.
        return "ok" if cause.kind == "join" else "wait" if cause.waited_s < self.wait_s else "fail"


def _at_least_one(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} should be a whole number from 1 on, not {number!r}")
    return number


def _range(what: str, lo: int, hi: int) -> tuple[int, int]:
    least = _at_least_one("lo", lo)
    most = _at_least_one("hi", hi)
    if least > most:
        raise ValueError(f"{lo} to {hi} {what} are none")
    return least, most


def _duration(given: float | str) -> float:
    return parse_duration(given) if isinstance(given, str) else float(given)


READY_MADE: Mapping[str, type[Any]] = {
    "failstop": FailStop,
    "minmax": MinMax,
    "waitfor": WaitFor,
    "keepbatch": KeepBatch,
    "finishifnear": FinishIfNear,
    "timeleft": TimeLeft,
}
_TEXT = re.compile(r"((?:.*\.py:)?[^:]*)(?::(.*))?")
"""The name of a file may have colons."""


def load_policy(text: str, least: int, most: int) -> AskedPolicy:
    """Returns the policy that `NAME[:ARGUMENTS]` or `FILE.py:CLASS[:ARGUMENTS]` means, for a training on `least` to
    `most` hosts. Raises UsageError, of one line.

    Arguments are separated by semicolons or commas. Without any, `failstop` takes `most`, `minmax` both, `waitfor`
    `least`.
    """
    match = _TEXT.fullmatch(text)
    name, written = match.groups() if match else (text, None)
    if not name:
        raise UsageError("a policy has no name", f"choose one of {', '.join(READY_MADE)} or FILE.py:CLASS")
    made = READY_MADE.get(name) or _class_of_file(text, name)
    if written is None:
        arguments: list[Any] = {"failstop": [most], "minmax": [least, most], "waitfor": [least]}.get(name, [])
    else:
        arguments = [_value(part.strip()) for part in re.split("[;,]", written) if part.strip()]
    try:
        inspect.signature(made).bind(*arguments)
    except TypeError as error:
        raise UsageError(f"policy {text}: {error}", f"{_usage(name, made)}") from None
    try:
        return AskedPolicy(made(*arguments), text)
    except PolicyError as error:
        raise UsageError(error.what, error.remedy) from error.__cause__
    except Exception as error:
        raise UsageError(f"policy {text} cannot be made: {type(error).__name__}", _usage(name, made)) from error


def _class_of_file(text: str, name: str) -> Any:  # noqa: ANN401 - a class, whatever it can do
    file, is_file, class_name = name.rpartition(".py:")
    if not is_file:
        raise UsageError(f"there is no policy {name}", f"choose one of {', '.join(READY_MADE)} or FILE.py:CLASS")
    path = Path(f"{file}.py")
    if not path.is_file():
        raise UsageError(f"policy {text}: {path} is not a file", "name a Python file")
    spec = importlib.util.spec_from_file_location(f"hpcstage_policy_{path.stem}", path.absolute())
    if spec is None or spec.loader is None:
        raise UsageError(f"policy {text}: {path} cannot be imported", "name a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"policy {text}: {path} raised {type(error).__name__}", "correct the file") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise UsageError(f"policy {text}: {path} has no class {class_name or '(no name)'}", "name one: FILE.py:CLASS")
    return found


def _value(text: str) -> int | float | str:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _usage(name: str, made: type[Any]) -> str:
    takes = [str(parameter) for parameter in inspect.signature(made).parameters.values()]
    return f"write {name}" + (f":ARGUMENTS, which are {', '.join(takes)}" if takes else " without arguments")
