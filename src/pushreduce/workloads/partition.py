"""How training samples are dealt to ranks: arithmetic on indices, the same on all ranks from one seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_IID, _DIRICHLET = 1, 2
"""Keep the two ways of dealing from sharing random numbers under one seed."""
_SMALLEST_SHARE = 1e-12
"""Dirichlet draws of small concentration underflow to 0, and a row or column of zeros cannot be scaled."""
_MAX_SCALINGS = 200


def compute_shard_sizes(num_samples: int, size: int, proportions: Sequence[float] | None = None) -> list[int]:
    """Samples of every rank: equal (they differ by 1 at most), or as near to `proportions` as possible.

    Raises:
        ValueError: fewer samples than ranks, proportions that do not fit, or a rank that would have no
        sample.
    """
    if num_samples < size:
        raise ValueError(f"{num_samples} training samples cannot be dealt to {size} ranks; start fewer ranks")
    if proportions is None:
        proportions = [1.0] * size
    if len(proportions) != size:
        raise ValueError(
            f"--shard-proportions has {len(proportions)} numbers for {size} ranks; give one number a rank"
        )
    shares = np.asarray(proportions, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError("--shard-proportions must be positive numbers")
    shares /= shares.max()  # their sum might overflow
    exact = num_samples * (shares / shares.sum())
    sizes = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(sizes - exact, kind="stable")[: num_samples - int(sizes.sum())]
    sizes[largest_remainders] += 1
    if sizes.min() == 0:
        raise ValueError(
            f"--shard-proportions leave rank {int(sizes.argmin())} without a sample; make them less unequal"
        )
    assert sizes.sum() == num_samples
    return [int(s) for s in sizes]


def deal_iid(shard_sizes: Sequence[int], seed: int) -> list[np.ndarray]:
    """Deals all samples at random: for every rank its sample numbers, int64, ascending."""
    order = np.random.default_rng([seed, _IID]).permutation(sum(shard_sizes))
    return [np.sort(shard) for shard in np.split(order, np.cumsum(shard_sizes)[:-1])]


def deal_dirichlet(
    labels: np.ndarray, shard_sizes: Sequence[int], alpha: float, seed: int
) -> list[np.ndarray]:
    """Deals all samples with class shares that differ by rank: for every rank its sample numbers, ascending.

    Every rank draws its class shares from Dirichlet(alpha p), p the shares in the whole set (Hsu, Qi and
    Brown 2019), after which dealing rank by rank would leave the last ranks what the others did not want.
    Here all ranks are treated alike: the table of draws is scaled in turn along its rows and columns
    (iterative proportional fitting) until ranks have their sizes and classes their counts, rounded down, and
    the few samples left over are placed so that both are met exactly.

    Args:
        labels: class of every sample, int64 [num_samples].
        shard_sizes: they add up to num_samples.
        alpha: concentration; small is skewed, infinity would be equal class shares.

    Raises:
        ValueError: alpha is not positive.
    """
    assert sum(shard_sizes) == len(labels)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"--dirichlet-alpha must be a positive number, not {alpha}")
    rng = np.random.default_rng([seed, _DIRICHLET])
    labels = np.unique(labels, return_inverse=True)[1]  # a class without samples could not be scaled
    class_counts = np.bincount(labels)
    counts = _draw_counts(np.asarray(shard_sizes), class_counts, alpha, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in range(len(class_counts)):
        samples = rng.permutation(np.flatnonzero(labels == label))
        owner[samples] = np.repeat(np.arange(len(shard_sizes)), counts[:, label])
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(shard_sizes)[:-1])


def _draw_counts(
    shard_sizes: np.ndarray, class_counts: np.ndarray, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Samples of each class on each rank, int64 [ranks, classes], with the given row and column sums."""
    concentration = np.maximum(alpha * class_counts / class_counts.sum(), _SMALLEST_SHARE)
    table = np.maximum(rng.dirichlet(concentration, size=len(shard_sizes)), _SMALLEST_SHARE)
    for _ in range(_MAX_SCALINGS):
        row_sums = table.sum(axis=1)
        if np.abs(row_sums - shard_sizes).max() < 0.5:
            break
        table *= (shard_sizes / row_sums)[:, None]
        table *= class_counts / table.sum(axis=0)
    # Columns are right and rows nearly; cut the rows that are too large, so that rounding down exceeds
    # neither.
    table *= np.minimum(1.0, shard_sizes / table.sum(axis=1))[:, None]
    counts = np.floor(table * (1 - 1e-12)).astype(np.int64)
    missing_rows = shard_sizes - counts.sum(axis=1)
    missing_columns = class_counts - counts.sum(axis=0)
    assert missing_rows.min() >= 0
    assert missing_columns.min() >= 0
    row = column = 0
    while row < len(missing_rows) and column < len(missing_columns):
        placed = min(missing_rows[row], missing_columns[column])
        counts[row, column] += placed
        missing_rows[row] -= placed
        missing_columns[column] -= placed
        if missing_rows[row] == 0:
            row += 1
        else:
            column += 1
    return counts
