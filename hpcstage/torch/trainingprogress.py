"""What a training tells the policies of its progress: how far it is, and how long the rest would take.

The module owns these numbers and the time of a step, which it follows; their names are the fields of
`hpcstage.elastic.policy.Progress`.
"""

from __future__ import annotations

import time

from hpcstage.torch.committed import Reached
from hpcstage.torch.elasticsampler import ElasticSampler

_OF_NEWEST = 0.1
"""The weight of the newest step in the time of a step."""


class TrainingProgress:
    """Follows one process."""

    def __init__(self) -> None:
        self.epochs = 0
        """How many the training has, once that is known."""
        self._step_s = self._stepped_s = 0.0

    def pause(self) -> None:
        """Says that the next step is the first of a membership: what it takes says nothing."""
        self._stepped_s = 0.0

    def stepped(self) -> None:
        """Takes the end of a step."""
        now_s = time.monotonic()
        if self._stepped_s:
            took_s = now_s - self._stepped_s
            self._step_s = took_s if not self._step_s else (1 - _OF_NEWEST) * self._step_s + _OF_NEWEST * took_s
        self._stepped_s = now_s

    def told(self, place: Reached, sampler: ElasticSampler) -> dict[str, float]:
        """Returns what a policy may know."""
        told: dict[str, float] = {"step": place.step, "batch_per_process": sampler.batch_size}
        if self.epochs and sampler.samples:
            done = place.epoch * sampler.samples + place.position
            whole = self.epochs * sampler.samples
            told["share"] = min(1.0, done / whole)
            if self._step_s:
                told["process_s_left"] = max(0, whole - done) / sampler.batch_size * self._step_s
        return told
