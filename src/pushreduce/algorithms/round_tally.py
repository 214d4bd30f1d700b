"""What ranks tell each other beside their pushes: samples, who finishes, who wants to stop, and the rounds begun.

A small all-reduce is under way all the time; a rank takes part whenever it looks, and nobody waits for it in training.
"""

from __future__ import annotations

import torch

from pushreduce.algorithms.base import Progress
from pushreduce.communication.base import Communicator, Handle

_SAMPLES, _FINISHING, _STOP_WANTED, _ROUNDS_BEGUN = range(4)


class RoundTally:
    """One rank's view of all. Every rank posts the k-th tally, and all read the same sums from it.

    Args:
        communicator: this rank's.
        progress: of the algorithm; kept up to date here.
    """

    def __init__(self, communicator: Communicator, progress: Progress) -> None:
        self._communicator, self._progress = communicator, progress
        self._handle: Handle | None = None
        self._own_samples_sent = 0
        self.rounds_begun = 0
        """Rounds that this rank has begun with a gradient, all those before included."""
        self.max_rounds_begun = 0
        """The largest of any rank, as far as is known."""
        self.finishing = False
        self.stop_wanted = False
        self.all_finishing = False
        """All ranks were finishing when they posted the last tally: `max_rounds_begun` is final."""

    def has_news(self) -> bool:
        """Whether `advance` would do anything."""
        return not self.all_finishing and (self._handle is None or self._handle.done())

    def advance(self) -> None:
        """Reads the tally that has come back, if one has, and takes part in the next."""
        if self._handle is not None and self._handle.done():
            self._read(self._handle.wait().tolist())
            self._handle = None
        if self._handle is None and not self.all_finishing:
            self._post()

    def end_finish(self) -> None:
        """All ranks are where all are: tallies go on with the next `advance`."""
        assert self.all_finishing
        assert self._handle is None
        self.finishing = self.all_finishing = False

    @property
    def in_flight(self) -> bool:
        return self._handle is not None

    def _post(self) -> None:
        own = torch.zeros(_ROUNDS_BEGUN + self._communicator.size, dtype=torch.float64)
        own[_SAMPLES] = self._own_samples_sent = self._progress.own_samples
        own[_FINISHING], own[_STOP_WANTED] = self.finishing, self.stop_wanted
        own[_ROUNDS_BEGUN + self._communicator.rank] = self.rounds_begun  # a maximum, from a mean
        self._handle = self._communicator.average_async(own, "rounds.tally")

    def _read(self, means: list[float]) -> None:
        sums = [round(mean * self._communicator.size) for mean in means]
        self._progress.agreed_samples += sums[_SAMPLES]
        self._progress.own_samples -= self._own_samples_sent
        self._progress.stop_requested = self._progress.stop_requested or sums[_STOP_WANTED] > 0
        self.max_rounds_begun = max(self.max_rounds_begun, *sums[_ROUNDS_BEGUN:])
        self.all_finishing = sums[_FINISHING] == self._communicator.size
