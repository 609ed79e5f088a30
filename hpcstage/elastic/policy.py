"""Says what a scale policy is and asks one.

The module owns the base class, the facts that a policy may take, and the question itself: which facts a policy's
signature accepts, how long it may think, and which answers there are. It knows no ready-made policy and no membership.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from hpcstage.elastic.waiting import Caller, NoAnswer
from hpcstage.errors import HpcstageError
from hpcstage.units import format_duration

Answer = Literal["ok", "wait", "fail"]
ANSWERS = frozenset(get_args(Answer))
ANSWER_LIMIT_S = 5.0
"""A policy that has not answered by then is an error: meanwhile nobody trains."""
MOST_LIMIT_S = 0.5
"""`most` is asked while others wait for a sign of life, and has nothing to think about."""
FACTS = ("cause", "progress", "time_left", "recoverable")
"""The facts that a policy takes by name, if its signature has them."""


class PolicyError(HpcstageError):
    """A scale policy raised, answered something else or did not answer: the message names the policy."""


class PolicyFailed(HpcstageError):
    """A scale policy said `fail`: the job ends on every host. The exit code is that of a failure that may be gone when
    the job is submitted again."""

    exit_code = 75


class MembershipChanged(HpcstageError):
    """Who trains changes: a running collective has ended, or none may begin. `hpcstage.torch.Elastic.run` takes it and
    goes on with the next membership; code that catches errors of its own has to let it pass."""


class Host(str):
    """The name of a host that would train, and how many processes train there."""

    __slots__ = ("processes",)
    processes: int

    def __new__(cls, name: str, processes: int = 1) -> Host:
        """Returns a string that also knows the number of its processes."""
        host = super().__new__(cls, name)
        host.processes = processes
        return host


@dataclass(frozen=True)
class Cause:
    """Why a policy is asked."""

    kind: Literal["start", "loss", "join", "failure"] = "start"
    """`start`: nobody trains yet; `loss`: hosts that trained are gone; `join`: hosts want to join those that train;
    `failure`: processes ended on hosts that are all there. A loss and a join at once are a loss."""
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    waited_s: float = 0.0
    """How long ago the change was first seen. After `wait` a policy is asked again, with more of it."""


@dataclass(frozen=True)
class Progress:
    """How far the training is. What is not known is None."""

    share: float | None = None
    """The part of the training that is done, from 0 to 1."""
    step: int | None = None
    batch_per_process: int | None = None
    process_s_left: float | None = None
    """The seconds that the rest would take one process."""
    hosts_at_start: int | None = None
    """The number of hosts when the training began."""


@dataclass(frozen=True)
class Facts:
    """All that a policy is asked about."""

    hosts: tuple[Host, ...]
    """The hosts that would train: first those that train now, in the order of their ranks, then those that join."""
    initial: bool
    """Whether none of the hosts trains yet."""
    cause: Cause = field(default_factory=Cause)
    progress: Progress = field(default_factory=Progress)
    time_left: float | None = None
    """Seconds until the job's time is over; None where nobody knows."""
    recoverable: bool | None = None
    """Whether these hosts can go on from a state: one that their processes have in memory, or a checkpoint that they
    can load. None where nobody knows, as before the first step."""


class ScalePolicy:
    """Decides whether to train on the hosts that are there. Subclasses override `ok2run`.

    >>> class Even(ScalePolicy):
    ...     def ok2run(self, hosts, initial):
    ...         return "ok" if len(hosts) % 2 == 0 else "wait"

    An `ok2run` that needs more takes any of these by name, or all of them as `**facts`:

    `ok2run(self, hosts, initial, *, cause, progress, time_left, recoverable)`

    One object is asked for as long as the host that decides lives; another host's begins anew.
    """

    if TYPE_CHECKING:
        ok2run: Callable[..., Answer]  # so that either signature is an override
    else:

        def ok2run(self, hosts, initial):  # noqa: ANN001, ANN201 - declared above
            """Returns `ok`: these hosts train; `wait`: those that train go on without the ones that would join, but if
            some were lost, all wait; `fail`: the job ends everywhere."""
            raise NotImplementedError(f"{type(self).__name__} does not define ok2run")

    def most(self, hosts: Sequence[Host]) -> int:
        """Returns how many of these hosts, from the first, the policy would take at most. It is asked about so many;
        the others are spares."""
        return len(hosts)


class AskedPolicy:
    """A policy by its name, with a bound on the time that it may think."""

    def __init__(self, policy: object, name: str, limit_s: float = ANSWER_LIMIT_S) -> None:
        """`policy` need not inherit from ScalePolicy. Raises PolicyError if `ok2run` cannot be called as documented."""
        self.name = name
        self._policy: Any = policy
        self._limit_s = limit_s
        self._accepted = _accepted_facts(policy, name)

    def ask(self, facts: Facts) -> Answer:
        """Returns the policy's answer. Raises PolicyError if it raises, answers something else or not in time.

        The policy runs in a thread of its own, which is left alone when its time is over. Code that holds the
        interpreter's lock all the time cannot be bounded this way.
        """
        given = {name: getattr(facts, name) for name in self._accepted}
        found = self._bounded(
            "ok2run", lambda: self._policy.ok2run(list(facts.hosts), facts.initial, **given), self._limit_s
        )
        if not isinstance(found, str) or found not in ANSWERS:
            raise PolicyError(f"policy {self.name} answered {found!r}", "ok2run returns 'ok', 'wait' or 'fail'")
        return cast(Answer, str(found))

    def most(self, hosts: Sequence[Host]) -> int:
        """Returns how many of the hosts the policy would take at most. Raises PolicyError as `ask` does."""
        if not hasattr(self._policy, "most"):
            return len(hosts)
        found = self._bounded("most", lambda: self._policy.most(list(hosts)), min(self._limit_s, MOST_LIMIT_S))
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise PolicyError(f"policy {self.name} takes {found!r} hosts at most", "most returns a number of hosts")
        return min(found, len(hosts))

    def _bounded(self, method: str, call: Callable[[], Any], limit_s: float) -> Any:  # noqa: ANN401
        caller = Caller(f"policy {self.name}")
        try:
            return caller.call(call, limit_s)
        except NoAnswer:
            late = f"policy {self.name} did not answer {method} within {format_duration(limit_s)}"
            raise PolicyError(late, "let it answer 'wait', and it is asked again") from None
        except BaseException as error:  # even SystemExit is no answer
            failed = f"policy {self.name} raised {type(error).__name__} in {method}"
            raise PolicyError(failed, "correct the policy") from error
        finally:
            caller.close()


def _accepted_facts(policy: object, name: str) -> tuple[str, ...]:
    """Returns the facts that a policy's `ok2run` takes by name."""
    ask = getattr(policy, "ok2run", None)
    if not callable(ask):
        raise PolicyError(f"policy {name} has no ok2run", "define ok2run(self, hosts, initial)")
    signature = inspect.signature(ask)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    accepted = tuple(fact for fact in FACTS if takes_all or fact in signature.parameters)
    try:
        signature.bind([], True, **dict.fromkeys(accepted))
    except TypeError as error:
        fix = f"define ok2run(self, hosts, initial, *, {', '.join(FACTS)})"
        raise PolicyError(f"policy {name} cannot be asked", fix) from error
    return accepted
