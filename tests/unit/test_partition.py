"""Every sample is dealt exactly once, in the sizes asked for, the same way on every rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushreduce.workloads.partition import compute_shard_sizes, deal_dirichlet, deal_iid


def assert_is_partition(shards: list[np.ndarray], shard_sizes: list[int]) -> None:
    assert [len(shard) for shard in shards] == shard_sizes
    np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(sum(shard_sizes)))


@given(size=st.integers(1, 1024), surplus=st.integers(0, 5000))
def test_equal_sizes_differ_by_one_at_most(size: int, surplus: int) -> None:
    sizes = compute_shard_sizes(size + surplus, size)
    assert sum(sizes) == size + surplus
    assert max(sizes) - min(sizes) <= 1


@given(proportions=st.lists(st.floats(0.5, 8.0), min_size=1, max_size=128))
def test_proportions_are_met_to_within_a_sample(proportions: list[float]) -> None:
    num_samples = 100 * len(proportions)
    sizes = compute_shard_sizes(num_samples, len(proportions), proportions)
    assert sum(sizes) == num_samples
    exact = num_samples * np.array(proportions) / np.sum(proportions)
    assert np.abs(sizes - exact).max() < 1 + 1e-9


@given(
    size=st.integers(1, 128),
    samples_per_rank=st.integers(1, 9),
    num_classes=st.integers(1, 20),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_is_in_exactly_one_shard(
    size: int, samples_per_rank: int, num_classes: int, alpha: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shard_sizes = rng.integers(1, samples_per_rank + 1, size=size).tolist()
    # Squared, so that classes differ in size and some may be missing.
    labels = (rng.random(sum(shard_sizes)) ** 2 * num_classes).astype(np.int64)
    assert_is_partition(deal_iid(shard_sizes, seed), shard_sizes)
    assert_is_partition(deal_dirichlet(labels, shard_sizes, alpha, seed), shard_sizes)


def test_1024_ranks_with_1000_classes() -> None:
    labels = np.arange(50_000) % 1000
    shard_sizes = compute_shard_sizes(len(labels), 1024)
    assert_is_partition(deal_dirichlet(labels, shard_sizes, 0.1, seed=0), shard_sizes)


def test_smaller_alpha_skews_more_and_a_large_one_not_at_all() -> None:
    labels = np.repeat(np.arange(10), 1000)
    shard_sizes = compute_shard_sizes(len(labels), 16)

    def mean_distance_from_uniform(alpha: float) -> float:
        shares = [
            np.bincount(labels[shard], minlength=10) / len(shard)
            for seed in range(5)
            for shard in deal_dirichlet(labels, shard_sizes, alpha, seed)
        ]
        return float(np.abs(np.array(shares) - 0.1).sum(axis=1).mean() / 2)

    distances = [mean_distance_from_uniform(alpha) for alpha in (0.1, 1.0, 10.0, 1e5)]
    assert distances == sorted(distances, reverse=True)
    # 0.9 would be one class a rank.
    assert distances[0] > 0.6
    assert distances[-1] < 0.02


def test_the_first_and_the_last_rank_are_skewed_alike() -> None:
    """Dealing rank by rank would leave the last ranks what the others did not want."""
    labels = np.repeat(np.arange(10), 400)
    shard_sizes = compute_shard_sizes(len(labels), 8)
    deals = [deal_dirichlet(labels, shard_sizes, 0.5, seed) for seed in range(60)]
    class_counts = np.array([[np.bincount(labels[shard], minlength=10) for shard in deal] for deal in deals])
    largest_share = (class_counts.max(axis=2) / class_counts.sum(axis=2)).mean(axis=0)
    assert abs(largest_share[0] - largest_share[-1]) < 0.1


def test_the_seed_decides_and_nothing_else() -> None:
    labels = np.arange(300) % 7
    shard_sizes = [100, 120, 80]
    for deal in (deal_iid, lambda sizes, seed: deal_dirichlet(labels, sizes, 0.5, seed)):
        first, again, other = deal(shard_sizes, 3), deal(shard_sizes, 3), deal(shard_sizes, 4)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "3 training samples cannot be dealt to 4 ranks"),
        ((10, 2, (1.0, 1.0, 2.0)), "3 numbers for 2 ranks"),
        ((10, 2, (1.0, -1.0)), "positive"),
        ((10, 2, (1.0, float("nan"))), "positive"),
        ((10, 2, (1.0, 1e-9)), "rank 1 without a sample"),
    ],
)
def test_impossible_sizes_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_shard_sizes(*arguments)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="dirichlet-alpha"):
        deal_dirichlet(np.zeros(4, dtype=np.int64), [2, 2], alpha, seed=0)
