"""The counts of global samples at which something is due in a run: evaluation, checkpoint, end."""

from __future__ import annotations

import math

from pushreduce.settings import TrainingSettings


class Milestones:
    """Where the run is among its milestones. All ranks pass the same ones in the same order.

    Args:
        settings: the intervals and the length, in epochs.
        num_train_samples: samples of an epoch.
    """

    def __init__(self, settings: TrainingSettings, num_train_samples: int) -> None:
        self._intervals = {
            "evaluate": max(1.0, settings.evaluate_every_epochs * num_train_samples),
            "checkpoint": max(1.0, settings.checkpoint_every_epochs * num_train_samples),
        }
        self._end = max(1, round(settings.epochs * num_train_samples))
        self._here = 0  # the last milestone passed, in global samples

    @property
    def ended(self) -> bool:
        return self._here >= self._end

    @property
    def next(self) -> int:
        """Global samples of the next milestone."""
        return min(map(self._next_of, self._intervals))

    @property
    def next_actions(self) -> list[str]:
        """What is due at the next milestone: of "evaluate" and "checkpoint"; at the end both."""
        return [action for action in self._intervals if self._next_of(action) == self.next]

    def pass_next(self) -> None:
        self._here = self.next

    def state_dict(self) -> dict[str, int]:
        return {"samples": self._here}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._here = state["samples"]

    def _next_of(self, action: str) -> int:
        """The first multiple of the action's interval beyond here, in whole samples, or the end."""
        interval = self._intervals[action]
        multiple = math.floor(self._here / interval)
        # Whole samples make multiples of different intervals that should coincide do so.
        while round(multiple * interval) <= self._here:
            multiple += 1
        return min(round(multiple * interval), self._end)
