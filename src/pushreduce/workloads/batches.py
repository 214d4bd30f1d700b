"""The order in which a rank sees its samples, and the reading of them in batches.

Owns passes without replacement, the random numbers of augmentation, loader processes and exact resume. Knows
nothing of what a sample is: a `Source` turns a `Request` into tensors.

A sample's place in the rank's endless stream is its *position*. Order and augmentation are functions of
(seed, rank, position) alone, hence independent of batch size, loader processes and restarts, and no process-
wide generator is touched.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from pushreduce.workloads.base import Batch

WORDS_PER_SAMPLE = 4
"""Random numbers for the augmentation of one sample: a block of the counter-based generator Philox4x64."""
_ORDER, _AUGMENTATION = 1, 2


class Request(NamedTuple):
    """The samples of one batch."""

    rows: np.ndarray
    """Their numbers in the source, int64 [batch]."""
    words: np.ndarray | None
    """Random numbers for their augmentation, uint64 [batch, WORDS_PER_SAMPLE]; None: none (validation)."""


class Loaded(NamedTuple):
    """What a source makes of a request. Errors travel as text: exceptions cross processes as tracebacks."""

    batch: Batch
    skipped_files: tuple[str, ...] = ()
    """Corrupt files that were replaced by others (training) or left out (validation)."""
    error: str | None = None
    """One line for the user; the batch is not to be used."""


class Source(Protocol):
    """Samples that can be read by number. Picklable where it is read by loader processes."""

    def __getitem__(self, request: Request) -> Loaded: ...

    def __len__(self) -> int: ...


class SampleStream:
    """Concatenated permutations of one rank's samples."""

    def __init__(self, num_samples: int, *, seed: int, rank: int) -> None:
        assert num_samples > 0
        self._num_samples = num_samples
        self._seed = seed
        self._rank = rank
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._generator_position = -1  # none yet
        self._generator = np.random.Philox()

    def request(self, position: int, batch_size: int) -> Request:
        """The samples at `batch_size` consecutive positions, which may belong to several passes."""
        rows = []
        start, end = position, position + batch_size
        while start < end:
            pass_number, offset = divmod(start, self._num_samples)
            rows.append(self._order_of(pass_number)[offset : offset + end - start])
            start += len(rows[-1])
        if self._generator_position != position:  # making one takes longer than all its numbers for a batch
            self._generator = np.random.Philox(
                np.random.SeedSequence([self._seed, self._rank, _AUGMENTATION])
            )
            self._generator.advance(position)
        words = self._generator.random_raw(batch_size * WORDS_PER_SAMPLE)
        self._generator_position = end
        return Request(np.concatenate(rows), words.reshape(batch_size, WORDS_PER_SAMPLE))

    def _order_of(self, pass_number: int) -> np.ndarray:
        if self._order[0] != pass_number:
            rng = np.random.default_rng([self._seed, self._rank, _ORDER, pass_number])
            self._order = (pass_number, rng.permutation(self._num_samples))
        return self._order[1]


def load_batches(
    source: Source, requests: Iterator[Request], num_loader_workers: int, skipped_files: set[str]
) -> Iterator[Batch]:
    """Reads the requests in order, here or in loader processes; batches without a sample are left out.

    Args:
        num_loader_workers: processes; 0: read in this one.
        skipped_files: corrupt files are added to it as their batch is handed out.

    Raises:
        ValueError: a sample cannot be read.
    """
    for loaded in _load(source, requests, num_loader_workers):
        if loaded.error is not None:
            raise ValueError(loaded.error)
        skipped_files.update(loaded.skipped_files)
        if loaded.batch.num_samples > 0:
            yield loaded.batch


class TrainBatches:
    """Endless batches of constant size over a rank's samples, each pass without replacement.

    A batch may straddle two passes: nothing is dropped. Positions count what was handed out, not what was
    read ahead.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        seed: int,
        rank: int,
        num_loader_workers: int = 0,
        skipped_files: set[str] | None = None,
    ) -> None:
        self._source = source
        self._batch_size = batch_size
        self._stream = SampleStream(len(source), seed=seed, rank=rank)
        self._num_loader_workers = num_loader_workers
        self._skipped_files = set() if skipped_files is None else skipped_files
        self._position = 0
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = load_batches(
                self._source, self._requests(), self._num_loader_workers, self._skipped_files
            )
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            # A scheduler that signals every process of the job also ends the loaders, while the rank
            # still has steps to do up to its last checkpoint.
            warnings.warn(f"{error}; this rank reads its samples itself from now on", stacklevel=2)
            self._num_loader_workers = 0
            self._batches = None
            return next(self)
        self._position += self._batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """The next sample's position; after loading it the same samples follow, augmented the same way."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]
        self._batches = None  # ends loader processes, which have read ahead of another position

    def _requests(self) -> Iterator[Request]:
        position = self._position
        while True:
            yield self._stream.request(position, self._batch_size)
            position += self._batch_size


def _load(source: Source, requests: Iterator[Request], num_loader_workers: int) -> Iterator[Loaded]:
    if num_loader_workers == 0:
        return (source[request] for request in requests)
    # A fork of this process would inherit MPI's and Horovod's threads and locks in an undefined state.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pushreduce.workloads.loader_server"])
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # a Dataset by its methods
        sampler=requests,  # any iterable will do
        batch_size=None,  # a request is a batch already
        collate_fn=_as_it_is,
        num_workers=num_loader_workers,
        multiprocessing_context=context,
        worker_init_fn=_end_with_the_rank,
        generator=torch.Generator(),  # else it draws a number from the global generator
    )
    return iter(loader)


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _end_with_the_rank(_worker: int) -> None:
    """torch watches the parent process, which is the fork server here: that lives as long as its children."""

    def wait_and_end() -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        rank.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()
