"""Resolves names that are not below a dataset as they are written, but lead below one through symbolic links.

The rules are the same as in C: a name is taken apart from the left, and every link is replaced by what it says, until a
dataset's directory is reached. A directory that leads elsewhere is passed over for REMEMBERED_S seconds, which can only
cost a copy. A spelling that leads below a dataset is believed for at most a second, and only while every link on its
way reads as it did. Calls that change something (AFRESH) use nothing that is remembered.
"""

from __future__ import annotations

import os
from errno import EINVAL
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

FOLLOWED = 1
"""The call follows a link in the last component."""
OPENS = 2
"""The call is an open: now and then it is checked whether the last component is a link."""
AFRESH = 4
"""The call changes something: what is remembered of links is not used."""
LINKS_MAX = 40
REMEMBERED_S = 10.0
BELIEVED_S = 1.0
DIRECTORIES = 8192
ALIASES = 32
LOOKS = 32
_readlink = os.readlink


class _Directory:
    """A directory that leads elsewhere, until a time. `looks` is how many opens in it are still checked for being links
    themselves; `has_links` says whether it has links to files of a dataset."""

    __slots__ = ("has_links", "looks", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.looks = LOOKS
        self.has_links = False


class _Alias:
    """A spelling of `leads_to`, which is in a dataset."""

    __slots__ = ("leads_to", "links", "since", "spelt")

    def __init__(self, spelt: str, leads_to: str, links: list[tuple[str, str]], since: float) -> None:
        self.spelt = spelt
        self.leads_to = leads_to
        self.links = links
        self.since = since

    def holds(self) -> bool:
        if monotonic() - self.since >= BELIEVED_S:
            return False
        try:
            return all(_readlink(link) == said for link, said in self.links)
        except OSError:
            return False


class NameResolver:
    """Resolves names. `is_below` says whether a plain absolute name is a dataset's directory or below one."""

    def __init__(self, is_below: Callable[[str], bool]) -> None:
        self._is_below = is_below
        self.forget()

    def forget(self) -> None:
        """Forgets what is remembered, because a link or a directory came under another name."""
        self._directories: dict[str, _Directory] = {}
        self._aliases: dict[str, _Alias] = {}

    def leads_outside(self, name: str, how: int = 0) -> bool:
        """Returns whether an absolute name outside is remembered to lead to no dataset."""
        known = self._directories.get(name.rpartition("/")[0])
        if known is None or known.has_links or (how and (how & AFRESH or known.looks)):
            return False
        return known.until > monotonic()

    def resolve(self, name: str, how: int) -> str | None:
        """Returns the name below a dataset's directory to which an absolute name (without `..`) leads, or None."""
        if how & AFRESH:
            return _LinkWalk(name, self._is_below, whole=bool(how & FOLLOWED), afresh=True).found
        directory = name.rpartition("/")[0]
        known = self._directories.get(directory)
        if known is None or known.until < monotonic():
            found = self._by_alias(name) or self._learn(name)
            if found is not None:
                return found
            known = self._remember(directory)
        if not how & FOLLOWED or not (known.has_links or (how & OPENS and known.looks)):
            return None
        found = _LinkWalk(name, self._is_below, whole=True).found
        known.looks = max(0, known.looks - 1)
        known.has_links = known.has_links or found is not None
        return found

    def _remember(self, directory: str) -> _Directory:
        if len(self._directories) >= DIRECTORIES:
            self._directories = {}
        known = self._directories[directory] = _Directory(monotonic() + REMEMBERED_S)
        return known

    def _by_alias(self, name: str) -> str | None:
        for alias in list(self._aliases.values()):
            if name.startswith(alias.spelt) and name[len(alias.spelt) : len(alias.spelt) + 1] == "/" and alias.holds():
                return alias.leads_to + name[len(alias.spelt) :]
        return None

    def _learn(self, name: str) -> str | None:
        since = monotonic()
        walk = _LinkWalk(name, self._is_below, whole=False)
        if walk.found is None:
            return None
        if len(self._aliases) >= ALIASES and walk.spelt not in self._aliases:
            self._aliases = {}
        leads_to = walk.found[: len(walk.found) - len(name) + len(walk.spelt)]
        self._aliases[walk.spelt] = _Alias(walk.spelt, leads_to, walk.links, since)
        return walk.found


class _LinkWalk:
    """Takes a plain absolute name apart, without its last component unless it is looked at as a whole."""

    def __init__(self, name: str, is_below: Callable[[str], bool], *, whole: bool, afresh: bool = False) -> None:
        self.found: str | None = None
        """The name below a dataset to which the name leads."""
        self.spelt = ""
        """The part of the name, as the caller wrote it, behind which there is no link any more."""
        self.links: list[tuple[str, str]] = []
        """The links on the way, and what they say."""
        self._behind = ""
        self._left = name.split("/")[:0:-1]
        """The components that are still to come, the next one last."""
        own = len(self._left)
        parts = name.split("/")
        while len(self._left) > (0 if whole else 1) and self._step(whole and not afresh):
            own = min(own, self._own)
            if ".." not in self._left and is_below(self._behind):
                self.found = "/".join([self._behind, *self._left[::-1]])
                self.spelt = "/".join(parts[: len(parts) - own])
                return

    def _step(self, reads: bool) -> bool:
        """Goes past the next component; returns whether it can be the way to somewhere. A read by a link to an open
        file means that file, whatever has its name by now."""
        part = self._left.pop()
        self._own = len(self._left)
        if part in ("", "."):
            return True
        parent = self._behind
        if part == "..":
            self._behind = parent.rpartition("/")[0]
            return True
        self._behind = parent + "/" + part
        if reads and not self._left and self._behind.startswith("/proc/"):
            return False
        try:
            says = _readlink(self._behind)
        except OSError as error:
            return error.errno == EINVAL
        except ValueError:
            return False
        self.links.append((self._behind, says))
        self._behind = "" if says[:1] == "/" else parent
        self._left.extend(says.split("/")[::-1])
        return len(self.links) <= LINKS_MAX
