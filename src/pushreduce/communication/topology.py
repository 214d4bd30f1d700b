"""Who sends to whom in which round: pure arithmetic, shared by the program, the mailbox and the oracle.

Owns SGP's graphs and their order by round; a round is a *sending* round, counted from 0 alike on all ranks. Knows no
communicator and no device. Averaged-gradient rounds, which push nothing, are the algorithm's; how well a graph averages
is `simulation/mixing.py`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Hops = tuple[int, ...]

# Enough for the rounds that tau and the mailbox's grants span; a round at 1024 ranks takes about 80 kB.
_NUM_CACHED_ROUNDS = 32


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

    @property
    def period(self) -> int | None:
        """After this many rounds the graphs come again in the same order; None: never.

        It holds from round `num_initial_rounds` on.
        """
        return None

    @property
    def num_initial_rounds(self) -> int:
        """Rounds at the beginning that do not come again."""
        return 0

    @abstractmethod
    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        """Those that `rank` sends to in `round` (0, 1, ...)."""

    @abstractmethod
    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        """Those that send to `rank` in `round`, in a fixed order."""

    def mixing_matrix(self, round_number: int) -> NDArray[np.float64]:
        """P of a round, float64 [size, size], column-stochastic: x <- P x where nothing is delayed.

        Column i is what rank i does with its mass: the uniform share 1 / (1 + number of out-neighbours) goes to each of
        them, and one stays.
        """
        matrix = np.zeros((self.size, self.size))
        for rank in range(self.size):
            receivers = [rank, *self.out_neighbours(rank, round_number)]
            matrix[receivers, rank] = 1 / len(receivers)
        return matrix


def build_topology(
    graph: str, size: int, *, num_peers: int = 1, two_peer_rounds: int = 0, seed: int = 0
) -> Topology:
    """The topology of a run. With one rank nobody sends, whatever the graph.

    Args:
        graph: "exponential" (directed), "bipartite-exponential" (undirected), "ring" (directed), "complete", or
            "random" (each round a permutation).
        size: number of ranks, at least 1.
        num_peers: 1 or 2 out-neighbours a round. 2 is for "exponential", where two ranks still have one peer each.
        two_peer_rounds: this many first rounds have 2 peers, later ones `num_peers` = 1; for "exponential".
        seed: of "random", the same on all ranks, at least 0; the other graphs need none.

    Raises:
        ValueError: an unknown graph, a number out of range, or settings that contradict each other.
    """
    if graph not in GRAPHS:
        raise ValueError(f"unknown graph {graph!r}: choose one of {', '.join(GRAPHS)}")
    if size < 1:
        raise ValueError(f"a graph over {size} ranks: there must be at least 1")
    if num_peers not in (1, 2):
        raise ValueError(f"num_peers {num_peers}: choose 1 or 2")
    if num_peers == 2 and graph != "exponential":
        raise ValueError(f"num_peers 2 needs graph exponential; {graph} fixes its own number of peers")
    if two_peer_rounds < 0:
        raise ValueError(f"two_peer_rounds {two_peer_rounds}: give 0 or more")
    if two_peer_rounds and graph != "exponential":
        raise ValueError(f"two_peer_rounds needs graph exponential; {graph} fixes its own number of peers")
    if two_peer_rounds and num_peers == 2:
        raise ValueError("two_peer_rounds needs num_peers 1; with num_peers 2 every round has two already")
    if seed < 0:
        raise ValueError(f"seed {seed}: give 0 or more")

    if size == 1:
        return Circulant(1, [()])
    if graph == "exponential":
        later = Circulant(size, exponential_hops(size, num_peers))
        if two_peer_rounds:
            return Switched(Circulant(size, exponential_hops(size, 2)), two_peer_rounds, later)
        return later
    if graph == "bipartite-exponential":
        return BipartiteExponential(size)
    if graph == "ring":
        return Circulant(size, [(1,)])
    if graph == "complete":
        return Circulant(size, [tuple(range(1, size))])
    return RandomPermutation(size, seed)


GRAPHS = ("exponential", "bipartite-exponential", "ring", "complete", "random")
"""What `build_topology` takes."""


def exponential_hops(size: int, num_peers: int) -> list[Hops]:
    """The hops 2^0, 2^1, ... 2^floor(log2(size - 1)) in turn, `num_peers` of them a round.

    One peer: 1 | 2 | 4 | 1 ... Two peers: of four hops 1, 2 | 4, 8 | 1, 2 ..., of three 1, 2 | 4, 1 | 2, 4 | 1, 2 ...
    Two ranks have one hop only.
    """
    num_hops = (size - 1).bit_length()
    num_peers = min(num_peers, num_hops)
    rounds: list[Hops] = []
    for first in range(0, num_hops * num_peers, num_peers):
        hops = tuple(1 << (exponent % num_hops) for exponent in range(first, first + num_peers))
        if hops in rounds:
            break
        rounds.append(hops)
    return rounds


class Circulant(Topology):
    """In round k every rank i sends to i + h (mod size), for each h of the round's hops.

    All mixing matrices are doubly stochastic, so that w stays 1 where nothing is delayed.

    Args:
        size: number of ranks.
        hops_by_round: of one period; the hops of a round differ and lie between 1 and size - 1.
    """

    def __init__(self, size: int, hops_by_round: list[Hops]) -> None:
        assert hops_by_round
        for hops in hops_by_round:
            assert len(set(hops)) == len(hops), hops
            assert all(0 < hop < size for hop in hops), hops
        self.size, self._hops_by_round = size, hops_by_round

    @property
    def max_in_degree(self) -> int:
        return max(len(hops) for hops in self._hops_by_round)

    @property
    def period(self) -> int:
        return len(self._hops_by_round)

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return tuple((rank + hop) % self.size for hop in self._hops(round_number))

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return tuple((rank - hop) % self.size for hop in self._hops(round_number))

    def _hops(self, round_number: int) -> Hops:
        return self._hops_by_round[round_number % self.period]


class BipartiteExponential(Topology):
    """Pairs of an even and an odd rank exchange: even i with i + h (mod size), for h = 1, 3, 7, ... 2^k - 1 in turn.

    The hops are those up to the number of ranks less one. Every mixing matrix is symmetric. The differences of the hops
    double from round to round, so that 2^k ranks agree exactly after the k rounds of a period.

    Among an odd number of ranks one finds no partner in a round: the one that would meet the absent next rank. It is
    always an even one, of which there is one more, and another in each round of a period.
    """

    def __init__(self, size: int) -> None:
        assert size > 1
        self.size = size
        self._even_size = size + size % 2

    @property
    def max_in_degree(self) -> int:
        return 1

    @property
    def period(self) -> int:
        return self._even_size.bit_length() - 1

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        hop = (2 << (round_number % self.period)) - 1
        partner = (rank + (hop if rank % 2 == 0 else -hop)) % self._even_size
        return (partner,) if partner < self.size else ()

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return self.out_neighbours(rank, round_number)


class RandomPermutation(Topology):
    """Each round is another permutation of the ranks, uniform among those without fixed points.

    It follows from (seed, round) alone, so that ranks need not draw in step and a resumed run goes on as it would have.
    """

    def __init__(self, size: int, seed: int) -> None:
        assert size > 1
        self.size, self._seed = size, seed
        self._permutations = lru_cache(_NUM_CACHED_ROUNDS)(self._draw)

    @property
    def max_in_degree(self) -> int:
        return 1

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (self._permutations(round_number)[0][rank],)

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (self._permutations(round_number)[1][rank],)

    def _draw(self, round_number: int) -> tuple[list[int], list[int]]:
        """(receiver of each rank, sender to each rank)."""
        # A block of the counter's lowest word a draw: the rounds' streams cannot overlap. Raw numbers are sorted rather
        # than Generator.permutation called, since NumPy promises only the former to be the same in all its versions.
        generator = np.random.Philox(key=self._seed, counter=[0, 0, 0, round_number])
        ranks = np.arange(self.size)
        while True:  # e = 2.7 draws on average
            receivers = np.argsort(generator.random_raw(self.size), kind="stable")
            if not np.any(receivers == ranks):
                return receivers.tolist(), np.argsort(receivers).tolist()


class Switched(Topology):
    """One topology in the first rounds, another one from then on; each is asked with the round's own number."""

    def __init__(self, first: Topology, num_first_rounds: int, later: Topology) -> None:
        assert first.size == later.size
        self.size = first.size
        self._first, self._num_first_rounds, self._later = first, num_first_rounds, later

    @property
    def max_in_degree(self) -> int:
        return max(self._first.max_in_degree, self._later.max_in_degree)

    @property
    def period(self) -> int | None:
        return self._later.period

    @property
    def num_initial_rounds(self) -> int:
        return self._num_first_rounds

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return self._at(round_number).out_neighbours(rank, round_number)

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return self._at(round_number).in_neighbours(rank, round_number)

    def _at(self, round_number: int) -> Topology:
        return self._first if round_number < self._num_first_rounds else self._later
