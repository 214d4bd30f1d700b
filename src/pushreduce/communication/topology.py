"""Who sends to whom in which round: pure arithmetic, shared by the program, the mailbox and the oracle.

Knows no communicator and no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Topology(ABC):
    """A directed graph over `size` ranks that may change with the round; the same on all ranks.

    No self-loops, and no rank twice in a list. In every round j is an out-neighbour of i exactly if i is an
    in-neighbour of j.
    """

    size: int

    @property
    @abstractmethod
    def max_in_degree(self) -> int:
        """The longest list of in-neighbours of any rank in any round."""

    @abstractmethod
    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        """Those that `rank` sends to in `round` (0, 1, ...)."""

    @abstractmethod
    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        """Those that send to `rank` in `round`, in a fixed order."""
