"""Topologies: what must hold of every graph among any number of ranks."""

from __future__ import annotations

from collections import Counter
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.communication.topology import (
    GRAPHS,
    BipartiteExponential,
    Circulant,
    Topology,
    build_topology,
    exponential_hops,
)
from pushreduce.settings import SGPSettings

SIZES = [*range(1, 65), 100, 127, 128, 129, 1000, 1023, 1024]
VARIANTS = {
    **{graph: {"graph": graph} for graph in GRAPHS},
    "two-peers": {"graph": "exponential", "num_peers": 2},
    "two-then-one": {"graph": "exponential", "two_peer_rounds": 3},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def test_the_settings_name_these_graphs():
    """They stand twice, since settings must not import NumPy."""
    assert get_args(get_type_hints(SGPSettings)["graph"]) == GRAPHS


def rounds_of(topology: Topology) -> range:
    """The rounds in which all that a topology does is seen; of the random one, a few."""
    return range(topology.num_initial_rounds + (topology.period or 6))


def reachable(neighbours: dict[int, set[int]]) -> set[int]:
    """The ranks that can be reached from rank 0."""
    seen, new = {0}, [0]
    while new:
        fresh = neighbours[new.pop()] - seen
        seen |= fresh
        new += fresh
    return seen


def product(topology: Topology, first_round: int, num_rounds: int) -> np.ndarray:
    result = np.eye(topology.size)
    for k in range(first_round, first_round + num_rounds):
        result = topology.mixing_matrix(k) @ result
    return result


# -- every graph, every number of ranks


@every_variant
def test_neighbours_agree_and_the_union_is_connected(variant: dict) -> None:
    for size in SIZES:
        if variant["graph"] == "complete" and size > 200:
            continue  # a million edges; what it does with them is tested on the matrices
        topology = build_topology(size=size, **variant)
        outs: dict[int, set[int]] = {rank: set() for rank in range(size)}
        ins: dict[int, set[int]] = {rank: set() for rank in range(size)}
        largest = 0
        for k in rounds_of(topology):
            edges, same_edges = set(), set()
            for rank in range(size):
                receivers, senders = topology.out_neighbours(rank, k), topology.in_neighbours(rank, k)
                assert rank not in receivers
                assert len(set(receivers)) == len(receivers)
                assert len(set(senders)) == len(senders)
                assert all(type(each) is int for each in (*receivers, *senders))
                edges |= {(rank, receiver) for receiver in receivers}
                same_edges |= {(sender, rank) for sender in senders}
                outs[rank] |= set(receivers)
                ins[rank] |= set(senders)
                largest = max(largest, len(senders))
            assert edges == same_edges, (size, k)
            assert all(0 <= receiver < size for _, receiver in edges)
        assert topology.max_in_degree == largest, size
        if topology.period is not None:
            assert len(reachable(outs)) == len(reachable(ins)) == size, (
                f"{size} ranks: not strongly connected"
            )


@every_variant
def test_every_mixing_matrix_conserves_the_sum(variant: dict) -> None:
    for size in SIZES:
        topology = build_topology(size=size, **variant)
        for k in rounds_of(topology):
            matrix = topology.mixing_matrix(k)
            assert matrix.shape == (size, size)
            assert matrix.dtype == np.float64
            assert matrix.min() >= 0
            np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-14)
            np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-14)
            assert matrix.diagonal().min() > 0
            if variant["graph"] in ("bipartite-exponential", "complete"):
                assert np.array_equal(matrix, matrix.T)


@every_variant
def test_a_mixing_matrix_has_the_neighbours_and_equal_shares(variant: dict) -> None:
    topology = build_topology(size=13, **variant)
    for k in rounds_of(topology):
        matrix = topology.mixing_matrix(k)
        for rank in range(topology.size):
            receivers = topology.out_neighbours(rank, k)
            assert set(np.flatnonzero(matrix[:, rank])) == {rank, *receivers}
            assert set(matrix[matrix[:, rank] > 0, rank]) == {1 / (1 + len(receivers))}


@every_variant
def test_a_period_comes_again(variant: dict) -> None:
    for size in (1, 2, 3, 7, 8, 12):
        topology = build_topology(size=size, **variant)
        if topology.period is None:
            continue
        start, period = topology.num_initial_rounds, topology.period
        one = [topology.mixing_matrix(start + k) for k in range(period)]
        for k in range(2 * period):
            assert np.array_equal(topology.mixing_matrix(start + k), one[k % period])
        assert len({matrix.tobytes() for matrix in one}) == period, "a shorter period would do"


@every_variant
def test_one_rank_alone_has_no_neighbours(variant: dict) -> None:
    topology = build_topology(size=1, **variant)
    assert topology.max_in_degree == 0
    assert topology.out_neighbours(0, 5) == topology.in_neighbours(0, 5) == ()
    assert topology.mixing_matrix(5).tolist() == [[1.0]]


# -- exponential


@pytest.mark.parametrize(
    ("graph", "exact_from_any_round"), [("exponential", True), ("bipartite-exponential", False)]
)
def test_powers_of_two_agree_exactly_after_log2_rounds(graph: str, exact_from_any_round: bool) -> None:
    for log2_size in range(1, 8):
        topology = build_topology(graph, 2**log2_size)
        for first_round in range(log2_size) if exact_from_any_round else (0, log2_size):
            assert np.all(product(topology, first_round, log2_size) == 0.5**log2_size)
            assert not np.allclose(product(topology, first_round, log2_size - 1), 0.5**log2_size)
    assert np.all(product(build_topology(graph, 1024), 0, 10) == 1 / 1024)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_hops_are_those_of_integer_logarithms(offset: int) -> None:
    for k in range(2, 70):  # float logarithms go wrong from about 2^48 on
        size = 2**k + offset
        hops = [2**exponent for exponent in range(80) if 2**exponent <= size - 1]
        assert exponential_hops(size, 1) == [(hop,) for hop in hops]
        exchanges = [2**exponent - 1 for exponent in range(1, 80) if 2**exponent - 1 < size + size % 2]
        assert BipartiteExponential(size).period == len(exchanges)
        for topology in (Circulant(size, exponential_hops(size, 2)), BipartiteExponential(size)):
            for rank in (0, 1, size // 3, size - 2, size - 1):
                for round_number in range(topology.period):
                    for receiver in topology.out_neighbours(rank, round_number):
                        assert rank in topology.in_neighbours(receiver, round_number)


def test_two_peers_take_all_hops_in_turn_equally_often() -> None:
    assert exponential_hops(2, 2) == [(1,)]
    for size in range(3, 200):
        rounds = exponential_hops(size, 2)
        in_turn = [hop for hops in rounds for hop in hops]
        single = [hop for (hop,) in exponential_hops(size, 1)]
        assert all(len(hops) == 2 for hops in rounds)
        assert in_turn == single * (len(in_turn) // len(single))


def test_two_peers_then_one() -> None:
    switched = build_topology("exponential", 12, two_peer_rounds=5)
    two, one = build_topology("exponential", 12, num_peers=2), build_topology("exponential", 12)
    for k in range(20):
        expected = two if k < 5 else one
        assert switched.out_neighbours(3, k) == expected.out_neighbours(3, k)
        assert switched.in_neighbours(3, k) == expected.in_neighbours(3, k)
    assert (switched.num_initial_rounds, switched.period) == (5, 4)


def test_exchanges_pair_even_with_odd_ranks_and_one_of_an_odd_number_rests() -> None:
    for size in range(2, 65):
        topology = build_topology("bipartite-exponential", size)
        resting = []
        for k in range(topology.period):
            alone = [rank for rank in range(size) if not topology.out_neighbours(rank, k)]
            assert len(alone) == size % 2
            resting += alone
            for rank in range(size):
                assert all((rank + partner) % 2 == 1 for partner in topology.out_neighbours(rank, k))
        assert len(set(resting)) == len(resting), "one rank rests twice in a period"


# -- random


@given(
    size=st.integers(2, 1024), seed=st.integers(0, 2**63), rounds=st.lists(st.integers(0, 2**40), max_size=3)
)
def test_random_permutations_follow_from_seed_and_round(size: int, seed: int, rounds: list[int]) -> None:
    topology = build_topology("random", size, seed=seed)
    drawn = {k: [topology.out_neighbours(rank, k)[0] for rank in range(size)] for k in rounds}
    other = build_topology("random", size, seed=seed)
    for k in reversed(rounds):
        assert [other.out_neighbours(rank, k)[0] for rank in range(size)] == drawn[k]
        assert sorted(drawn[k]) == list(range(size))
        assert all(other.in_neighbours(receiver, k) == (rank,) for rank, receiver in enumerate(drawn[k]))


def test_random_permutations_differ_by_seed_and_round_and_outlive_the_cache() -> None:
    def permutation(topology: Topology, k: int) -> tuple[int, ...]:
        return tuple(topology.out_neighbours(rank, k)[0] for rank in range(50))

    topologies = [build_topology("random", 50, seed=seed) for seed in range(3)]
    drawn = [[permutation(topology, k) for k in range(200)] for topology in topologies]
    assert len({each for of_one_seed in drawn for each in of_one_seed}) == 600
    assert [permutation(topologies[0], k) for k in range(200)] == drawn[0]


def test_random_permutations_are_what_they_always_were() -> None:
    topology = build_topology("random", 8, seed=3)  # resumed runs and ranks with another NumPy rely on it
    assert [topology.out_neighbours(rank, 5)[0] for rank in range(8)] == [3, 6, 1, 4, 0, 7, 2, 5]


def test_random_permutations_are_uniform_among_those_without_fixed_points() -> None:
    topology, num_rounds = build_topology("random", 4, seed=1), 4500
    counts = Counter(
        tuple(topology.out_neighbours(rank, k)[0] for rank in range(4)) for k in range(num_rounds)
    )
    expected = num_rounds / 9
    assert len(counts) == 9
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 26.1  # of 8 degrees of freedom: 1 in 1000 is larger


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph": "star"}, "unknown graph 'star'"),
        ({"graph": "exponential", "size": 0}, "0 ranks"),
        ({"graph": "exponential", "num_peers": 3}, "num_peers 3"),
        *[
            ({"graph": graph, **setting}, f"needs graph exponential; {graph}")
            for graph in GRAPHS
            if graph != "exponential"
            for setting in ({"num_peers": 2}, {"two_peer_rounds": 5})
        ],
        ({"graph": "exponential", "two_peer_rounds": -1}, "two_peer_rounds -1"),
        ({"graph": "exponential", "two_peer_rounds": 5, "num_peers": 2}, "needs num_peers 1"),
        ({"graph": "random", "seed": -1}, "seed -1"),
        ({"graph": "ring", "size": 1, "num_peers": 2}, "num_peers 2"),
    ],
)
def test_impossible_combinations_are_refused_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_topology(**{"size": 4, **arguments})
    assert "\n" not in str(error.value)
