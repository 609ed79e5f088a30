"""Owns the checkpoint directory of a run: what is different there from an output directory.

The daemon puts the newest state into it before the command starts. What killed runs left on this node for the same DIR
is that state, or is older; it goes when this run's newest checkpoints are in DIR.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from hpcstage import extras
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace
from hpcstage.errors import HpcstageError, NotStarted
from hpcstage.extras import Extra
from hpcstage.node import kept
from hpcstage.record.jsonform import read
from hpcstage.record.parts.checkpoints import CheckpointsPart, GenerationRow
from hpcstage.wrapper import late, messages, outdir
from hpcstage.wrapper.outdir import NamedDirectory
from hpcstage.wrapper.outputs import CannotPrepare, RunNode, RunOutputs

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.record.parts.run import RunPart

RESTORED_S = 3600.0
"""The command waits for so long until the newest state lies in its directory; a signal ends the wait."""
_NEEDED = ("numpy", "xxhash")
_ON_ONE_NODE = "checkpoints are protected by their copies in DIR alone: one node has no other that could keep parities"


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
                    late.drain(earlier, lock, RESTORED_S, has_target=True)
        super().give_up(why)

    def _prepare(self, place: kept.KeptPlace, node: RunNode, config: Config) -> None:
        if (missing := extras.missing(Extra.CHECKPOINT, *_NEEDED)) is not None:
            raise CannotPrepare(missing.line())
        above = place.path.parent
        self._earlier = late.take_checkpoints(above, self.part.directory, says_used=False)  # the start named them
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
                    late.drain(earlier, lock, late.AT_START_S, has_target=True)

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
