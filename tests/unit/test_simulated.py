"""The simulated cluster: collectives, determinism, adversarial interleavings, and what ends a run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pushreduce.communication.simulated import Aborted, Deadlock, SimulatedCluster

MAX_RANKS = 5
clusters = st.builds(
    SimulatedCluster,
    st.integers(1, MAX_RANKS),
    seed=st.integers(0, 2**32),
    ranks_per_host=st.integers(1, 3),
    average_seconds=st.sampled_from([None, lambda num_bytes, size: 1e-3 * num_bytes * size]),
    jitter=st.sampled_from([0.0, 1.0, 30.0]),
)


def busy_body(communicator):
    """Three rounds of two averages, compute of random length, and a log of what was seen when."""
    log = []
    for _ in range(3):
        values = torch.full((4,), float(communicator.rank), dtype=torch.float64)
        handles = [communicator.average_async(values, name) for name in ("a", "b")]
        while not all(handle.done() for handle in handles):
            communicator.clock.sleep(torch.rand(()).item() * 1e-3)
            log.append(communicator.clock.now())
        log.append(communicator.clock.now())
    return log


@settings(max_examples=40)
@given(clusters)
def test_averages_are_exact_and_summed_in_rank_order(cluster):
    sent = torch.randn(cluster.num_ranks, 3, 7, dtype=torch.float32)
    rounds = 3
    expected = []
    for k in range(rounds):
        total = torch.zeros(7)
        for rank in range(cluster.num_ranks):
            total = total + sent[rank, k]
        expected.append(total / cluster.num_ranks)

    def body(communicator):
        means = []
        for k in range(rounds):
            communicator.clock.sleep(torch.rand(()).item() * 1e-2)
            means.append(communicator.average(sent[communicator.rank, k], "values"))
        return means

    for means in cluster.run(body):
        for mean, reference in zip(means, expected, strict=True):
            assert torch.equal(mean, reference)


@settings(max_examples=30)
@given(clusters)
def test_the_seed_alone_decides_a_run(cluster):
    assert cluster.run(busy_body) == cluster.run(busy_body)


def test_seeds_differ_in_interleaving():
    def body(communicator, order):
        for _ in range(3):
            order.append(communicator.rank)
            communicator.clock.sleep(1.0)

    orders = set()
    for seed in range(20):
        order = []
        SimulatedCluster(3, seed=seed).run(lambda communicator, order=order: body(communicator, order))
        orders.add(tuple(order))
    assert len(orders) > 10


def test_jitter_lets_ranks_see_one_end_in_any_order():
    def body(communicator):
        communicator.average(torch.zeros(1), "x")
        return communicator.clock.now()

    orders = {
        tuple(torch.tensor(SimulatedCluster(3, seed=seed, jitter=1.0).run(body)).argsort().tolist())
        for seed in range(60)
    }
    assert len(orders) == 6


def test_time_of_an_average_counts_from_the_last_rank_to_post():
    cluster = SimulatedCluster(3, average_seconds=lambda num_bytes, size: num_bytes * size)

    def body(communicator):
        communicator.clock.sleep(10.0 * communicator.rank)
        communicator.average(torch.zeros(2, dtype=torch.float32), "x")
        return communicator.clock.now()

    assert cluster.run(body) == [20.0 + 8 * 3] * 3


def test_done_does_not_pass_time_unless_it_is_spun_on():
    def body(communicator):
        handle = communicator.average_async(torch.zeros(1), "x")
        assert not handle.done()
        assert communicator.clock.now() == 0.0
        while not handle.done():
            pass
        return communicator.clock.now()

    (end,) = SimulatedCluster(1, average_seconds=lambda *_: 3.0).run(body)
    assert 3.0 <= end < 3.1


@settings(max_examples=30)
@given(clusters)
def test_names_match_by_use_whatever_the_order_of_posting(cluster):
    def body(communicator):
        names = ["a", "b", "c"]
        for use in range(3):
            order = torch.randperm(3).tolist()
            handles = {
                names[i]: communicator.average_async(torch.tensor([10.0 * use + i]), names[i]) for i in order
            }
            communicator.clock.sleep(torch.rand(()).item())
            for i in torch.randperm(3).tolist():
                assert handles[names[i]].wait().item() == 10.0 * use + i
                assert handles[names[i]].wait().item() == 10.0 * use + i

    cluster.run(body)


def test_out_receives_the_mean_also_in_place():
    def body(communicator):
        buffer = torch.full((2,), float(communicator.rank), dtype=torch.bfloat16)
        out = torch.empty_like(buffer)
        assert communicator.average(buffer, "out", out=out) is out
        assert communicator.average(buffer, "in place", out=buffer) is buffer
        return out.tolist(), buffer.tolist(), buffer.dtype

    assert SimulatedCluster(3, jitter=1.0).run(body) == [([1.0, 1.0], [1.0, 1.0], torch.bfloat16)] * 3


@settings(max_examples=30)
@given(clusters)
def test_collectives(cluster):
    def body(communicator):
        rank, size = communicator.rank, communicator.size
        buffer = torch.full((3,), rank)
        communicator.broadcast(buffer, "x", root=size - 1)
        assert buffer.tolist() == [size - 1] * 3
        mine = {"rank": rank, "list": []}
        gathered = communicator.allgather(mine)
        assert [each["rank"] for each in gathered] == list(range(size))
        gathered[0]["list"].append(rank)
        communicator.clock.sleep(float(rank))
        entered = communicator.clock.now()
        communicator.barrier()
        return entered, communicator.clock.now(), gathered[0]["list"]

    entered, left, lists = zip(*cluster.run(body), strict=True)
    assert max(entered) <= min(left)
    assert list(lists) == [[rank] for rank in range(cluster.num_ranks)]


def test_local_ranks():
    places = SimulatedCluster(5, ranks_per_host=2).run(lambda c: (c.rank, c.size, c.local_rank, c.local_size))
    assert places == [(0, 5, 0, 2), (1, 5, 1, 2), (2, 5, 0, 2), (3, 5, 1, 2), (4, 5, 0, 1)]


@settings(max_examples=30)
@given(clusters)
def test_wait_until_sees_what_other_ranks_do(cluster):
    reached = []

    def body(communicator):
        communicator.wait_until(lambda: len(reached) == communicator.rank)
        handle = communicator.average_async(torch.zeros(1), "x")
        reached.append(communicator.rank)
        communicator.wait_until(handle.done)
        assert len(reached) == communicator.size

    cluster.run(body)


@pytest.mark.parametrize("timeout_seconds", [0.0, 1.0, 2.5])
def test_wait_until_ends_when_its_time_is_over(timeout_seconds):
    flag = []

    def body(communicator):
        if communicator.rank == 1:
            communicator.clock.sleep(2.0)
            return flag.append(1)
        true = communicator.wait_until(lambda: bool(flag), timeout_seconds)
        assert true == (timeout_seconds > 2.0)
        assert communicator.clock.now() == min(timeout_seconds, 2.0)
        assert communicator.wait_until(lambda: bool(flag))
        assert communicator.clock.now() == 2.0
        assert communicator.wait_until(lambda: True, 0.0)
        assert not communicator.wait_until(lambda: False, 3.0)  # with no other event to come
        assert communicator.clock.now() == 5.0
        return None

    SimulatedCluster(2).run(body)


def test_an_error_in_a_predicate_is_its_ranks_own():
    flag = []

    def body(communicator):
        if communicator.rank == 1:
            communicator.clock.sleep(1.0)
            return flag.append(1)
        with pytest.raises(ZeroDivisionError):
            communicator.wait_until(lambda: bool(flag) and 1 / 0)
        return None

    SimulatedCluster(2).run(body)


# -- what ends a run


def test_a_deadlock_names_who_waits_for_what():
    def body(communicator):
        if communicator.rank == 0:
            communicator.average(torch.zeros(1), "weights")
        elif communicator.rank == 1:
            communicator.barrier()
        elif communicator.rank == 2:
            communicator.wait_until(lambda: False)

    with pytest.raises(Deadlock) as caught:
        SimulatedCluster(4).run(body)
    message = str(caught.value)
    assert "rank 0 waits for average 'weights'" in message
    assert "not entered by ranks [1, 2, 3]" in message
    assert "rank 1 waits for barrier" in message
    assert "rank 2 waits for wait_until" in message
    assert "rank 3 waits" not in message


def test_polling_for_ever_is_a_deadlock():
    def body(communicator):
        if communicator.rank == 0:
            communicator.barrier()
        handle = communicator.average_async(torch.zeros(1), "x")
        while not handle.done():
            communicator.clock.sleep(1e-3)

    with pytest.raises(Deadlock, match=r"rank 1 polls done\(\).*rank 0 waits for barrier"):
        SimulatedCluster(2).run(body)


def test_an_exception_ends_the_run_and_names_its_rank():
    ended = []

    def body(communicator):
        try:
            if communicator.rank == 1:
                communicator.clock.sleep(1.0)
                raise KeyError("mine")
            communicator.barrier()
        finally:
            ended.append(communicator.rank)
            if communicator.rank == 2:
                communicator.barrier()  # a careless clean-up must not hang or hide the error

    with pytest.raises(KeyError, match="mine") as caught:
        SimulatedCluster(3).run(body)
    assert sorted(ended) == [0, 1, 2]
    if hasattr(caught.value, "__notes__"):
        assert "rank 1 of 3" in caught.value.__notes__[0]


def test_abort_cannot_be_caught_by_a_rank():
    def body(communicator):
        try:
            if communicator.rank == 1:
                communicator.abort("NaN loss", exit_code=3)
            communicator.barrier()
        except Exception:
            pytest.fail("caught")

    with pytest.raises(Aborted, match=r"rank 1 .* 3: NaN loss") as caught:
        SimulatedCluster(2).run(body)
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.float64))],
)
def test_buffers_that_do_not_match(mine, theirs):
    for call in (lambda c, b: c.average(b, "x"), lambda c, b: c.broadcast(b, "x")):
        with pytest.raises(ValueError, match=r"rank [01] calls .*'x'.* rank [01] calls"):
            SimulatedCluster(2).run(lambda c, call=call: call(c, mine if c.rank == 0 else theirs))


def test_collectives_in_different_order():
    with pytest.raises(ValueError, match="must agree"):
        SimulatedCluster(2).run(lambda c: c.barrier() if c.rank == 0 else c.allgather(1))


def test_a_name_has_one_outstanding_average():
    def body(communicator):
        handle = communicator.average_async(torch.zeros(1), "x")
        with pytest.raises(RuntimeError, match="'x' is still outstanding"):
            communicator.average_async(torch.zeros(1), "x")
        communicator.clock.sleep(1.0)
        assert handle.done()
        communicator.average(torch.zeros(1), "x")

    SimulatedCluster(2).run(body)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_changed_before_it_is_done(in_place):
    def body(communicator):
        buffer = torch.zeros(3)
        handle = communicator.average_async(buffer, "x", out=buffer if in_place else None)
        if communicator.rank == 1:
            buffer[2] = 1.0
        handle.wait()

    with pytest.raises(RuntimeError, match="rank 1 changed the buffer of average 'x'"):
        SimulatedCluster(2).run(body)


def test_nan_travels():
    (mean, _) = SimulatedCluster(2).run(lambda c: c.average(torch.tensor([float("nan"), 1.0]), "x"))
    assert mean.isnan().tolist() == [True, False]


def test_integers_are_not_averaged():
    with pytest.raises(ValueError, match=r"int64.*float"):
        SimulatedCluster(1).run(lambda c: c.average(torch.zeros(1, dtype=torch.int64), "x"))


# -- what torch keeps process-wide


@settings(max_examples=20)
@given(clusters)
def test_each_rank_has_its_own_generator(cluster):
    def draws(communicator):
        torch.manual_seed(communicator.rank)
        drawn = []
        for _ in range(4):
            communicator.barrier()
            drawn.append(torch.randn(3))
        return torch.stack(drawn)

    outside = torch.get_rng_state()
    drawn_per_rank = cluster.run(draws)
    assert torch.equal(torch.get_rng_state(), outside)
    for rank, drawn in enumerate(drawn_per_rank):
        expected = torch.stack(
            [
                torch.randn(3, generator=generator)
                for generator in [torch.Generator().manual_seed(rank)]
                for _ in "1234"
            ]
        )
        assert torch.equal(drawn, expected)


def test_unseeded_ranks_draw_different_numbers():
    drawn = SimulatedCluster(4).run(lambda c: torch.rand(()).item())
    assert len(set(drawn)) == 4


@settings(max_examples=20)
@given(clusters)
def test_each_rank_has_its_own_grad_mode_and_autocast(cluster):
    def body(communicator):
        odd = communicator.rank % 2 == 1
        weight = torch.ones(2, 2, requires_grad=True)
        for k in range(1, 4):
            with torch.set_grad_enabled(odd), torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
                for _ in range(3):
                    communicator.clock.sleep(torch.rand(()).item())
                    assert torch.is_grad_enabled() == odd
                    product = torch.ones(2, 2) @ weight
                    assert product.dtype == (torch.bfloat16 if odd else torch.float32)
                    assert product.requires_grad == odd
                    assert product[0, 0].item() == 2 * k  # not a stale cast
            with torch.no_grad():
                weight += 1.0
        assert torch.is_grad_enabled()

    cluster.run(body)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_waiting_inside_backward_is_refused():
    def body(communicator):
        weight = torch.ones(2, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda parameter: communicator.average(parameter.grad, "g"))
        weight.sum().backward()

    with pytest.raises(RuntimeError, match="inside backward"):
        SimulatedCluster(2).run(body)


def test_posting_inside_backward_is_what_hooks_may_do():
    def body(communicator):
        handles = []
        weight = torch.ones(2, requires_grad=True)
        weight.register_post_accumulate_grad_hook(
            lambda parameter: handles.append(communicator.average_async(parameter.grad, "g"))
        )
        (weight.sum() * communicator.rank).backward()
        return handles[0].wait().tolist()

    assert SimulatedCluster(3).run(body) == [[1.0, 1.0]] * 3
