"""The sample stream: passes without replacement, constant batches, exact resume, no generator disturbed."""

import multiprocessing
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.workloads.base import Batch
from pushreduce.workloads.batches import Loaded, Request, SampleStream, TrainBatches


class Numbers:
    """A source whose inputs are the random numbers and whose targets are the sample numbers."""

    def __init__(self, num_samples: int, corrupt: tuple[int, ...] = ()) -> None:
        self._num_samples = num_samples
        self._corrupt = corrupt

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, request: Request) -> Loaded:
        assert request.words is not None
        bad = [str(row) for row in request.rows if row in self._corrupt]
        inputs = torch.from_numpy(request.words.view(np.int64))
        return Loaded(Batch(inputs, torch.from_numpy(request.rows)), error=f"bad {bad[0]}" if bad else None)


def make_batches(
    num_samples: int, batch_size: int, *, seed: int = 1, rank: int = 0, num_loader_workers: int = 0
):
    return TrainBatches(
        Numbers(num_samples), batch_size, seed=seed, rank=rank, num_loader_workers=num_loader_workers
    )


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 90), num_passes=st.integers(1, 4))
def test_every_pass_holds_every_sample_once(num_samples: int, batch_size: int, num_passes: int) -> None:
    num_batches = -(-num_samples * num_passes // batch_size)
    batches = list(islice(make_batches(num_samples, batch_size), num_batches))
    assert {batch.num_samples for batch in batches} == {batch_size}
    stream = torch.cat([batch.targets for batch in batches])[: num_samples * num_passes]
    for one_pass in stream.reshape(num_passes, num_samples):
        assert sorted(one_pass.tolist()) == list(range(num_samples))


@given(cuts=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_order_and_augmentation_do_not_depend_on_batch_size(cuts: list[int]) -> None:
    whole = SampleStream(13, seed=5, rank=2).request(0, sum(cuts))
    stream = SampleStream(13, seed=5, rank=2)
    starts = np.cumsum([0, *cuts[:-1]]).tolist()
    parts = [stream.request(start, count) for start, count in zip(starts, cuts, strict=True)]
    np.testing.assert_array_equal(whole.rows, np.concatenate([part.rows for part in parts]))
    np.testing.assert_array_equal(whole.words, np.concatenate([part.words for part in parts]))


def test_passes_ranks_and_seeds_differ_in_order_and_augmentation() -> None:
    def first_two_passes(seed: int, rank: int) -> list[Request]:
        stream = SampleStream(50, seed=seed, rank=rank)
        return [stream.request(0, 50), stream.request(50, 50)]

    requests = first_two_passes(0, 0) + first_two_passes(0, 1) + first_two_passes(1, 0)
    assert len({tuple(request.rows) for request in requests}) == 6
    assert Counter(np.concatenate([request.words for request in requests]).ravel()).most_common(1)[0][1] == 1


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_resumes_at_the_next_sample(num_loader_workers: int) -> None:
    undisturbed = list(islice(make_batches(17, 5), 12))
    interrupted = make_batches(17, 5, num_loader_workers=num_loader_workers)
    assert_equal(list(islice(interrupted, 4)), undisturbed[:4])
    state = interrupted.state_dict()
    assert all(type(value) is int for value in state.values())

    resumed = make_batches(17, 5, num_loader_workers=num_loader_workers)
    resumed.load_state_dict(state)
    assert_equal(list(islice(resumed, 8)), undisturbed[4:])
    # Going back drops what was read ahead.
    resumed.load_state_dict(state)
    assert_equal(list(islice(resumed, 2)), undisturbed[4:6])


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_the_global_generators_are_left_alone(num_loader_workers: int) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(islice(make_batches(10, 4, num_loader_workers=num_loader_workers), 5))
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_an_error_is_one_line_wherever_it_was_met(num_loader_workers: int) -> None:
    batches = TrainBatches(Numbers(4, corrupt=(2,)), 4, seed=0, rank=0, num_loader_workers=num_loader_workers)
    with pytest.raises(ValueError, match=r"^bad 2$"):
        next(batches)


def test_loses_no_sample_with_a_loader_process() -> None:
    undisturbed = list(islice(make_batches(17, 5), 12))
    others = set(multiprocessing.active_children())
    batches = make_batches(17, 5, num_loader_workers=1)
    first = list(islice(batches, 3))
    (loader,) = set(multiprocessing.active_children()) - others
    loader.kill()
    loader.join()
    with pytest.warns(UserWarning, match="reads its samples itself"):
        rest = list(islice(batches, 9))
    assert_equal(first + rest, undisturbed)


def test_loader_processes_end_with_a_rank_that_is_killed() -> None:
    program = f"""
import multiprocessing, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
if __name__ == "__main__":
    from test_batches import make_batches
    batches = make_batches(17, 5, num_loader_workers=2)
    next(batches)
    print(*[loader.pid for loader in multiprocessing.active_children()], flush=True)
    time.sleep(3600)
"""
    # The loaders hold the pipe too: its end of file says that the last of them is gone.
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert len(rank.stdout.readline().split()) == 2
        rank.kill()
        assert rank.stdout.read() == b""


def test_to_converts_floating_point_inputs_only() -> None:
    cpu = torch.device("cpu")
    targets = torch.tensor([3, 4])
    images = Batch(torch.zeros(2, 1), targets).to(cpu, torch.float64)
    tokens = Batch(torch.tensor([[1], [2]]), targets).to(cpu, torch.bfloat16)
    assert images.inputs.dtype == torch.float64
    assert images.targets.dtype == torch.int64
    assert tokens.inputs.dtype == torch.int64
