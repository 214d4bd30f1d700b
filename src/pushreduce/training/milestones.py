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
            "evaluate": settings.evaluate_every_epochs,
            "checkpoint": settings.checkpoint_every_epochs,
        }
        self._end = settings.epochs
        self._num_train_samples = num_train_samples
        self._here = 0.0  # epochs at the last milestone passed

    @property
    def ended(self) -> bool:
        return self._here >= self._end

    @property
    def next(self) -> float:
        """Global samples of the next milestone."""
        return min(map(self._epoch_of, self._intervals)) * self._num_train_samples

    @property
    def next_actions(self) -> list[str]:
        """What is due at the next milestone: of "evaluate" and "checkpoint"; at the end both."""
        epoch = min(map(self._epoch_of, self._intervals))
        return [action for action in self._intervals if self._epoch_of(action) == epoch]

    def pass_next(self) -> None:
        self._here = min(map(self._epoch_of, self._intervals))

    def state_dict(self) -> dict[str, float]:
        return {"epochs": self._here}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._here = state["epochs"]

    def _epoch_of(self, action: str) -> float:
        """The first multiple of the action's interval beyond here, or the end."""
        interval = self._intervals[action]
        num_passed = math.floor(self._here / interval + 1e-9)  # here may be a rounded multiple
        return min((num_passed + 1) * interval, self._end)
