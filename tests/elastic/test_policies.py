"""What each scale policy answers, how any of them is asked, and the text that names one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.elastic import (
    Cause,
    Facts,
    FailStop,
    FinishIfNear,
    Host,
    KeepBatch,
    MinMax,
    Progress,
    ScalePolicy,
    TimeLeft,
    WaitFor,
)
from hpcstage.elastic.policies import load_policy
from hpcstage.elastic.policy import ANSWERS, AskedPolicy, PolicyError
from hpcstage.errors import UsageError


def hosts(count: int, processes: int = 1) -> tuple[Host, ...]:
    return tuple(Host(f"n{number}", processes) for number in range(count))


def facts(count: int, kind: str = "loss", waited_s: float = 0.0, processes: int = 1, **known: object) -> Facts:
    recoverable, time_left = known.pop("recoverable", None), known.pop("time_left", None)
    cause = Cause(kind, waited_s=waited_s)
    return Facts(hosts(count, processes), kind == "start", cause, Progress(**known), time_left, recoverable)


TABLE = [
    (FailStop(3), facts(3, "start"), "ok"),
    (FailStop(3), facts(2, "start"), "wait"),
    (FailStop(3), facts(2), "fail"),
    (MinMax(2, 4), facts(1, "start"), "wait"),
    (MinMax(2, 4), facts(2, "start"), "ok"),
    (MinMax(2, 4), facts(4, "join"), "ok"),
    (MinMax(2, 4), facts(5, "join"), "wait"),
    (MinMax(2, 4), facts(1), "fail"),
    (MinMax(2, 4), facts(2, recoverable=True), "ok"),
    (MinMax(2, 4), facts(2, recoverable=False), "wait"),
    (MinMax(2, 4), facts(2, "start", recoverable=False), "ok"),
    (MinMax(2, 4), facts(2, "failure", recoverable=False), "ok"),
    (WaitFor(2, 60), facts(1, "start", 59), "wait"),
    (WaitFor(2, 60), facts(1, "start", 60), "fail"),
    (WaitFor(2, 60), facts(2, "start"), "ok"),
    (WaitFor(2, "1m"), facts(1, "loss", 59), "wait"),
    (WaitFor(2, "1m"), facts(1, "loss", 60), "fail"),
    (WaitFor(2, "1m"), facts(2, "loss"), "ok"),
    (WaitFor(2, 60), facts(3, "join", 59), "wait"),
    (WaitFor(2, 60), facts(3, "join", 60), "ok"),
    (KeepBatch(64, 128, 8), facts(1, "start", processes=4), "wait"),
    (KeepBatch(64, 128, 8), facts(2, processes=4), "ok"),
    (KeepBatch(64, 128), facts(4, "join", processes=4, batch_per_process=8), "ok"),
    (KeepBatch(64, 128), facts(5, "join", processes=4, batch_per_process=8), "wait"),
    (KeepBatch(64, 128), facts(1, processes=4, batch_per_process=8), "fail"),
    (FinishIfNear(0.8), facts(1, "start"), "ok"),
    (FinishIfNear(0.8), facts(3, share=0.8, hosts_at_start=4), "ok"),
    (FinishIfNear(0.8), facts(3, share=0.5, hosts_at_start=4), "fail"),
    (FinishIfNear(0.8), facts(3, hosts_at_start=4), "fail"),
    (FinishIfNear(0.8), facts(4, "join", share=0.1, hosts_at_start=4), "ok"),
    (TimeLeft(), facts(2, "loss"), "ok"),
    (TimeLeft(), facts(2, "loss", process_s_left=200, time_left=100), "ok"),
    (TimeLeft(), facts(2, "loss", process_s_left=201, time_left=100), "fail"),
    (TimeLeft("1m"), facts(2, "loss", 59, process_s_left=201, time_left=100), "wait"),
    (TimeLeft("1m"), facts(2, "loss", 60, process_s_left=201, time_left=100), "fail"),
    (TimeLeft(), facts(3, "join", process_s_left=900, time_left=100), "ok"),
]


@pytest.mark.parametrize(("policy", "asked", "answer"), TABLE)
def test_answers(policy: ScalePolicy, asked: Facts, answer: str) -> None:
    assert AskedPolicy(policy, type(policy).__name__).ask(asked) == answer


@pytest.mark.parametrize(
    ("policy", "there", "most"),
    [
        (FailStop(3), 5, 3),
        (MinMax(2, 4), 3, 3),
        (MinMax(2, 4), 6, 4),
        (WaitFor(2, 1), 9, 9),
        (KeepBatch(8, 40, 8), 9, 2),
    ],
)
def test_spares_are_those_that_a_policy_would_not_take(policy: ScalePolicy, there: int, most: int) -> None:
    assert AskedPolicy(policy, "p").most(hosts(there, 2)) == most


@given(
    st.sampled_from([FailStop(2), MinMax(1, 3), WaitFor(2, 30), KeepBatch(8, 64, 8), FinishIfNear(0.5), TimeLeft(10)]),
    st.integers(1, 6),
    st.sampled_from(["start", "loss", "join", "failure"]),
    st.floats(0, 1e6),
    st.one_of(st.none(), st.floats(0, 1)),
    st.one_of(st.none(), st.floats(0, 1e6)),
    st.one_of(st.none(), st.booleans()),
)
def test_every_question_has_an_answer_and_a_policy_forgets_nothing_by_it(
    policy: ScalePolicy,
    count: int,
    kind: str,
    waited_s: float,
    share: float | None,
    left_s: float | None,
    recoverable: bool | None,
) -> None:
    asked = facts(count, kind, waited_s, share=share, process_s_left=left_s, time_left=left_s, recoverable=recoverable)
    given = {"cause": asked.cause, "progress": asked.progress, "time_left": left_s, "recoverable": recoverable}
    answers = {policy.ok2run(asked.hosts, asked.initial, **given) for _ in range(2)}
    assert len(answers) == 1
    assert answers <= ANSWERS
    assert 0 <= policy.most(asked.hosts) <= count
    if kind == "start" and not isinstance(policy, WaitFor):
        assert answers != {"fail"}, "at the start hosts are only not there yet"


class Paper(ScalePolicy):
    def ok2run(self, hosts: list[Host], initial: bool) -> str:
        return "ok" if len(hosts) == 2 and not initial else "wait"


class Rich(ScalePolicy):
    def ok2run(self, hosts, initial, *, cause, progress, time_left, recoverable):
        return "ok" if (cause.kind, progress.step, time_left, recoverable) == ("loss", 7, 5, True) else "fail"


class Some(ScalePolicy):
    def ok2run(self, hosts, initial, progress=None):
        return "ok" if progress.step == 7 else "fail"


class All(ScalePolicy):
    def ok2run(self, hosts, initial, **known):
        return "ok" if sorted(known) == ["cause", "progress", "recoverable", "time_left"] else "fail"


class NotInherited:
    def ok2run(self, hosts, initial):
        return "ok"


@pytest.mark.parametrize("policy", [Paper(), Rich(), Some(), All(), NotInherited()])
def test_each_signature_is_called_with_the_facts_that_it_takes(policy: ScalePolicy) -> None:
    assert AskedPolicy(policy, "p").ask(facts(2, step=7, time_left=5, recoverable=True)) == "ok"


class Raises(ScalePolicy):
    def ok2run(self, hosts, initial):
        raise KeyError("gpu")


class Exits(ScalePolicy):
    def ok2run(self, hosts, initial):
        raise SystemExit(0)


class SaysYes(ScalePolicy):
    def ok2run(self, hosts, initial):
        return True


class Silent(ScalePolicy):
    def ok2run(self, hosts, initial):
        threading.Event().wait()


class TakesTooMany(ScalePolicy):
    def ok2run(self, hosts, initial):
        return "ok"

    def most(self, hosts):
        return "all"


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (Raises(), "policy mine raised KeyError in ok2run: 'gpu' (correct the policy)"),
        (Exits(), "policy mine raised SystemExit in ok2run: 0 (correct the policy)"),
        (SaysYes(), "policy mine answered True (ok2run returns 'ok', 'wait' or 'fail')"),
        (Silent(), "policy mine did not answer ok2run within 50 ms (let it answer 'wait', and it is asked again)"),
        (ScalePolicy(), "policy mine raised NotImplementedError in ok2run: ScalePolicy does not define ok2run"),
    ],
)
def test_a_policy_that_does_not_answer_is_an_error_that_names_it(policy: ScalePolicy, line: str) -> None:
    with pytest.raises(PolicyError) as raised:
        AskedPolicy(policy, "mine", limit_s=0.05 if isinstance(policy, Silent) else 60).ask(facts(2))
    assert line in raised.value.line()


def test_most_is_checked_as_well() -> None:
    with pytest.raises(PolicyError, match="policy mine takes 'all' hosts at most"):
        AskedPolicy(TakesTooMany(), "mine").most(hosts(2))


def test_a_host_is_its_name() -> None:
    host = Host("n1", 4)
    assert (host, host.processes, sorted([Host("b"), Host("a")])) == ("n1", 4, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "count", "kind", "answer"),
    [
        ("failstop", 4, "start", "ok"),
        ("failstop:2", 2, "start", "ok"),
        ("minmax", 1, "loss", "fail"),
        ("minmax:1,4", 1, "loss", "ok"),
        ("waitfor", 1, "loss", "wait"),
        ("waitfor:2,0s", 1, "loss", "fail"),
        ("keepbatch:8,16,8", 1, "loss", "ok"),
        ("keepbatch:8;16;4", 1, "loss", "fail"),
        ("finishifnear", 1, "start", "ok"),
        ("timeleft", 1, "loss", "ok"),
        ("timeleft:5m", 1, "loss", "ok"),
    ],
)
def test_a_name_and_its_arguments(text: str, count: int, kind: str, answer: str) -> None:
    policy = load_policy(text, 2, 4)
    assert (policy.name, policy.ask(facts(count, kind))) == (text, answer)


def test_a_class_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Even:\n"
        "    least: int = 2\n"
        "    def ok2run(self, hosts, initial):\n"
        "        return 'ok' if len(hosts) >= self.least and len(hosts) % 2 == 0 else 'wait'\n"
    )
    assert [load_policy(f"{file}:Even", 1, 8).ask(facts(count)) for count in (1, 2, 3)] == ["wait", "ok", "wait"]
    assert [load_policy(f"{file}:Even:4", 1, 8).ask(facts(count)) for count in (2, 4)] == ["wait", "ok"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "a policy has no name"),
        ("minmux", "there is no policy minmux (choose one of failstop, minmax, waitfor,"),
        ("minmax:4,2", "policy minmax:4,2 cannot be made: ValueError: 4 to 2 hosts are none"),
        ("minmax:2", "missing a required argument: 'hi'"),
        ("minmax:a,b", "lo should be a whole number from 1 on, not 'a'"),
        ("timeleft:soon", "'soon' is not a duration"),
        ("finishifnear:80", "share should be from 0 to 1, not 80"),
        ("{dir}/none.py:Even", "none.py is not a file"),
        ("{dir}/own.py:Odd", "own.py has no class Odd (name one: FILE.py:CLASS)"),
        ("{dir}/own.py:number", "own.py has no class number"),
        ("{dir}/own.py:Deaf", "own.py:Deaf has no ok2run (define ok2run(self, hosts, initial))"),
        (
            "{dir}/own.py:Demanding",
            "cannot be asked: missing a required argument: 'moon' (define",
        ),
        ("{dir}/broken.py:Any", "broken.py raised ZeroDivisionError: division by zero (correct the file)"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "own.py").write_text(
        "number = 1\nclass Deaf:\n    pass\nclass Demanding:\n    def ok2run(self, hosts, initial, moon): pass\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UsageError) as raised:
        load_policy(text.format(dir=tmp_path), 2, 4)
    assert line in raised.value.line()
    assert raised.value.exit_code == 2
