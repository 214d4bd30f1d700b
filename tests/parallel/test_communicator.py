"""The contract of Communicator, on both of its forms."""

from __future__ import annotations

import pytest
import torch

LONGER_THAN_A_SEGMENT = 5_000_000  # float32: 20 MB


def vector(rank: int, num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: their sum is exact in every type, in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (num_elements,), generator=generator).to(dtype)


def mean(size: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    total = sum(vector(rank, num_elements, torch.float64) for rank in range(size))
    return (total / size).to(dtype)


@pytest.mark.parametrize("num_elements", [1, 1000, LONGER_THAN_A_SEGMENT])
@pytest.mark.parametrize("where", ["new", "out", "in place"])
def test_average(ranks, num_elements, where):
    def body(communicator):
        buffer = vector(communicator.rank, num_elements)
        out = {"new": None, "out": torch.empty_like(buffer), "in place": buffer}[where]
        handle = communicator.average_async(buffer, "x", out=out)
        result = handle.wait()
        assert handle.done()
        assert handle.wait() is result
        if out is not None:
            assert result.data_ptr() == out.data_ptr()
        if where != "in place":
            assert torch.equal(buffer, vector(communicator.rank, num_elements))
        torch.testing.assert_close(result, mean(communicator.size, num_elements, torch.float32))
        return True

    assert all(ranks.run(body))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_average_of_every_floating_type(ranks, dtype):
    def body(communicator):
        result = communicator.average(vector(communicator.rank, 100, dtype), "x")
        assert result.dtype == dtype
        torch.testing.assert_close(result, mean(communicator.size, 100, dtype))
        return True

    assert all(ranks.run(body))


def test_average_of_another_memory_order(ranks):
    def body(communicator):
        image = vector(communicator.rank, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
        result = communicator.average(image.to(memory_format=torch.channels_last), "image")
        torch.testing.assert_close(result, mean(communicator.size, 120, torch.float32).view(2, 3, 4, 5))
        return True

    assert all(ranks.run(body))


def test_averages_match_by_name_in_any_order_of_posting(ranks):
    def body(communicator):
        names = ["a", "b", "c", "d"]
        order = names[communicator.rank % 4 :] + names[: communicator.rank % 4]
        buffers = {name: torch.full((3,), float(names.index(name))) for name in names}
        handles = {name: communicator.average_async(buffers[name], name) for name in order}
        return {name: handle.wait().tolist() for name, handle in handles.items()}

    for result in ranks.run(body):
        assert result == {"a": [0.0] * 3, "b": [1.0] * 3, "c": [2.0] * 3, "d": [3.0] * 3}


def test_a_name_under_way_is_refused(ranks):
    if ranks.size == 1 and ranks.real:
        pytest.skip("one real rank's average is done at once")

    def body(communicator):
        handle = communicator.average_async(torch.ones(2), "x")
        with pytest.raises(RuntimeError, match="x"):
            communicator.average_async(torch.ones(2), "x")
        handle.wait()
        return communicator.average(torch.ones(2), "x").tolist()

    assert all(result == [1.0, 1.0] for result in ranks.run(body))


def test_broadcast_allgather_and_places(ranks):
    def body(communicator):
        root = communicator.size - 1
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            buffer = torch.full((2, 3), communicator.rank == root).to(dtype)
            communicator.broadcast(buffer, "buffer", root=root)
            assert bool((buffer == 1).all())
        scalar = torch.tensor(float(communicator.rank))
        communicator.broadcast(scalar, "scalar")
        assert scalar.item() == 0.0
        communicator.barrier()
        assert 0 <= communicator.local_rank < communicator.local_size <= communicator.size
        return communicator.allgather({"rank": communicator.rank, "text": "x" * 1000 * communicator.rank})

    for gathered in ranks.run(body):
        assert [each["rank"] for each in gathered] == list(range(ranks.size))
        assert [len(each["text"]) for each in gathered] == [1000 * rank for rank in range(ranks.size)]


def test_the_clock_and_waiting_until(ranks):
    def body(communicator):
        start = communicator.clock.now()
        communicator.clock.sleep(0.01)
        slept = communicator.clock.now() - start
        handle = communicator.average_async(torch.ones(1), "x")
        communicator.wait_until(handle.done)
        assert handle.done()
        handle.wait()
        return slept

    assert all(slept >= 0.01 for slept in ranks.run(body))
