"""The options that name a program's sampler, checked against one another, as a value for the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcstage.errors import UsageError

if TYPE_CHECKING:
    from hpcstage.plan.order.readings import SamplerAsked

_ONLY = {
    "ranks": ("distributed",),
    "rank": ("distributed",),
    "no_shuffle": ("distributed",),
    "sampler_drop_last": ("distributed",),
    "persistent_workers": ("random",),
    "seed": ("random", "distributed"),
    "batch": ("sequential", "random", "distributed"),
    "drop_last": ("sequential", "random", "distributed"),
}
"""Options that mean something with these samplers alone."""
_MOST_RANKS = 1 << 20
_MOST_SEED = 1 << 63


def asked(given: Mapping[str, Any], epochs: int | None) -> SamplerAsked | None:
    """Returns the sampler that was named, or None. Raises UsageError for options that do not go together."""
    sampler = given.get("sampler")
    for name, samplers in _ONLY.items():
        value = given.get(name)
        if value is not None and value is not False and sampler not in samplers:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} needs --sampler {' or '.join(samplers)}", f"add it, or leave out {flag}")
    if sampler is None:
        return None
    from hpcstage.plan.order.readings import SamplerAsked

    if given.get("drop_last") and given.get("batch") is None:
        raise UsageError("--drop-last needs the size of a batch", "add --batch N")
    replicas = given.get("ranks") or 1
    if sampler == "distributed" and given.get("ranks") is None:
        raise UsageError("--sampler distributed needs the number of processes", "add --ranks N")
    return SamplerAsked(
        sampler=sampler,
        seed=_seed(given.get("seed") or 0),
        epochs=epochs or 1,
        shuffle=not given.get("no_shuffle"),
        sampler_drop_last=bool(given.get("sampler_drop_last")),
        replicas=replicas,
        ranks=_ranks(given.get("rank"), replicas),
        batch=given.get("batch") or 1,
        drop_last=bool(given.get("drop_last")),
        persistent_workers=bool(given.get("persistent_workers")),
    )


def _seed(seed: int) -> int:
    if not -_MOST_SEED <= seed < _MOST_SEED:
        raise UsageError(f"--seed {seed} is no seed of PyTorch", "use a number of at most 63 bits")
    return seed


def _ranks(text: str | None, replicas: int) -> tuple[int, ...]:
    """Returns the ranks of a text such as `3`, `0-3` or `0,2-3`; all of them without a text."""
    if replicas > _MOST_RANKS:
        raise UsageError(f"--ranks {replicas:,} are too many", f"use at most {_MOST_RANKS:,}")
    if text is None:
        return tuple(range(replicas))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 9 for end in ends):
            raise UsageError(f"--rank {text}: {part.strip()!r} is not a rank", "use --rank N, N-M or N,M")
        if not int(ends[0]) <= int(ends[1]) < replicas:
            what = f"--rank {text}: {part.strip()} is not among 0 to {replicas - 1}"
            raise UsageError(what, "ranks count from 0 and are fewer than --ranks")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(found))
