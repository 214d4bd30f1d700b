"""Counters that travel behind the weights: exact integers through an average in float32.

float32 counts without gaps to 2^24 only. A count is therefore sent as two digits to base 4096, each of which stays
exact when up to 1024 ranks are summed; the mean times the number of ranks, rounded, is the digit's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BASE = 4096
MAX_RANKS = 1024


@dataclass
class Tally:
    """What one rank tells the others with a message, or the sum of what all have told."""

    LENGTH = 4
    """Elements that a tally takes in a payload."""

    samples: int = 0
    """Samples since the rank's last message."""
    finishing: int = 0
    """1: inside `finish()`. Summed: how many are."""
    stop_wanted: int = 0

    def write_to(self, tail: torch.Tensor) -> None:
        """Writes this rank's counters into `tail` [LENGTH], any floating type of at least 24 bits' precision."""
        assert self.samples < _BASE**2, "too many samples between two messages"
        high, low = divmod(self.samples, _BASE)
        tail.copy_(torch.tensor([high, low, self.finishing, self.stop_wanted], dtype=tail.dtype))

    @classmethod
    def sum_from(cls, tail: torch.Tensor, size: int) -> Tally:
        """The sum over `size` ranks from the mean `tail` [LENGTH] of their tallies."""
        high, low, finishing, stop_wanted = (round(mean * size) for mean in tail.tolist())
        return cls(samples=high * _BASE + low, finishing=finishing, stop_wanted=stop_wanted)
