"""The simulated communicator on a model of a cluster: each cost where it belongs, and the real pages against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pushreduce.algorithms import LASGD, SGP, AllReduceSGD
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.communication.topology import build_topology
from pushreduce.settings import LASGDSettings, SGPSettings
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.cluster_transport import simulated_cluster
from pushreduce.simulation.collectives import arrival_seconds, ring_allreduce

RATE = 8e6  # a byte a microsecond
LATENCY = 1e-3
MODEL = ClusterModel(
    num_hosts=4,
    link_bits_per_second=RATE,
    latency_seconds=LATENCY,
    step_seconds=0.1,
    ring_from_bytes=4096,
    average_overhead_seconds=0.02,
    average_overhead_seconds_per_doubling=0.003,
    average_seconds_per_byte=1e-8,
    put_overhead_seconds=0.005,
    put_seconds_per_byte=2e-8,
    in_host_latency_seconds=1e-4,
    in_host_seconds_per_byte=1e-9,
)


def floats(num_bytes):
    return torch.zeros(num_bytes // 4)


def average_end(num_bytes, delay=lambda rank: 0.0, name="x"):
    def body(communicator):
        communicator.clock.sleep(delay(communicator.rank))
        communicator.average(floats(num_bytes), name)
        return communicator.clock.now()

    return body


@settings(max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 24),
    st.sampled_from([0, 4, 400, 40_000, 1_000_000]),
    st.sampled_from([1000, 30_000, 1 << 24]),
    st.booleans(),
)
def test_an_average_alone_takes_its_closed_form_from_the_last_entry(
    num_hosts, ranks_per_host, num_ranks, num_bytes, segment_bytes, averages_hosts_first
):
    model = replace(
        MODEL,
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        segment_bytes=segment_bytes,
        averages_hosts_first=averages_hosts_first,
    )
    num_ranks = min(num_ranks, model.num_ranks)
    cluster = simulated_cluster(model, num_ranks=num_ranks)
    ends = cluster.run(average_end(num_bytes, lambda rank: 0.5 * rank))
    expected = 0.5 * (num_ranks - 1) + model.average_seconds(num_bytes, num_ranks)
    assert ends == pytest.approx([expected] * num_ranks, rel=1e-9)


def test_a_small_average_waits_behind_a_long_one():
    def body(communicator):
        long = communicator.average_async(floats(1_000_000), "weights")
        communicator.clock.sleep(0.1)
        communicator.average(torch.zeros(2, dtype=torch.float64), "tally")
        behind = communicator.clock.now()
        long.wait()
        assert communicator.clock.now() == behind
        return behind

    expected = MODEL.average_seconds(1_000_000, 4) + MODEL.average_seconds(16, 4)
    assert simulated_cluster(MODEL).run(body) == pytest.approx([expected] * 4, rel=1e-9)


def test_averages_posted_together_are_agreed_on_together_and_fused_by_dtype():
    def body(communicator):
        handles = [communicator.average_async(floats(3000 * k), f"gradient.{k}") for k in (1, 2, 3)]
        tally = communicator.average_async(torch.zeros(2, dtype=torch.float64), "tally")
        for handle in handles:
            handle.wait()
        fused = communicator.clock.now()
        tally.wait()
        return fused, communicator.clock.now()

    overhead = MODEL.average_overhead_seconds + 2 * MODEL.average_overhead_seconds_per_doubling
    fused = MODEL.average_seconds(18_000, 4)
    for ends in simulated_cluster(MODEL).run(body):
        assert ends == pytest.approx((fused, fused + MODEL.average_seconds(16, 4) - overhead), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_sent_and_summed_in_float32_as_by_horovod(dtype):
    def body(communicator):
        mean = communicator.average(torch.full((10_000,), 1.0 + communicator.rank / 64, dtype=dtype), "x")
        return communicator.clock.now(), mean

    for end, mean in simulated_cluster(MODEL).run(body):
        assert end == pytest.approx(MODEL.average_seconds(4 * 10_000, 4), rel=1e-9)
        # Sums of three or four need more bits than bfloat16 has above 2.
        assert torch.equal(mean, torch.full((10_000,), 1.0 + 1.5 / 64).to(dtype))


def test_barriers_go_past_horovod():
    def body(communicator):
        handle = communicator.average_async(floats(1_000_000), "weights")
        communicator.barrier()
        past = communicator.clock.now()
        handle.wait()
        return past

    for past in simulated_cluster(MODEL).run(body):
        assert LATENCY <= past < 0.1 * MODEL.average_seconds(1_000_000, 4)


def push(topology, num_payload_bytes, delay=lambda rank: 0.0, average_bytes=0):
    """Every rank sends once to all its receivers; when each has all its messages, and the bytes of one."""

    def body(communicator):
        mailbox = communicator.open_mailbox(topology, num_payload_bytes=num_payload_bytes, num_slot_rounds=2)
        start = communicator.clock.now()
        handle = communicator.average_async(floats(average_bytes), "x") if average_bytes else None
        communicator.clock.sleep(delay(communicator.rank))
        to = topology.out_neighbours(communicator.rank, 0)
        for receiver in to:
            assert mailbox.reserve(0, receiver)
        mailbox.outgoing()[:] = communicator.rank
        mailbox.send(0, to, 0.5)
        mailbox.wait(lambda: mailbox.num_rounds_received > 0, 0, lambda message: None)
        received = communicator.clock.now() - start
        averaged = None
        if handle is not None:
            handle.wait()
            averaged = communicator.clock.now() - start
        mailbox.free()
        return received, averaged, mailbox.num_message_bytes

    return body


def put_seconds(num_bytes, share=1.0):
    """Hand-over, the bytes at a share of the link, their latency, and the counter's."""
    hand_over = MODEL.put_overhead_seconds + num_bytes * MODEL.put_seconds_per_byte
    return hand_over + 8 * num_bytes / (RATE * share) + 2 * LATENCY


@pytest.mark.parametrize("num_peers", [1, 2])
def test_messages_of_one_sender_share_its_link(num_peers):
    topology = build_topology("exponential", 4, num_peers=num_peers)
    for received, _, num_bytes in simulated_cluster(MODEL).run(push(topology, 100_000)):
        assert received == pytest.approx(put_seconds(num_bytes, 1 / num_peers), rel=1e-9)


def test_ranks_of_a_host_share_its_link_and_take_none_among_themselves():
    """Of the ring 0 1 | 2 3 every host sends and receives one message; of hops by 2, two at once."""
    model = replace(MODEL, num_hosts=2, ranks_per_host=2)
    results = simulated_cluster(model).run(push(build_topology("ring", 4), 100_000))
    num_bytes = results[0][2]
    inside = MODEL.put_overhead_seconds + num_bytes * MODEL.put_seconds_per_byte
    expected = [put_seconds(num_bytes), inside, put_seconds(num_bytes), inside]
    assert [received for received, _, _ in results] == pytest.approx(expected, rel=1e-9)
    two = simulated_cluster(model).run(push(build_topology("complete", 4), 100_000))
    # 2 ranks x 2 receivers on the other host.
    assert [received for received, _, _ in two] == pytest.approx(
        [put_seconds(num_bytes, 1 / 4)] * 4, rel=1e-9
    )


def test_a_ring_and_messages_slow_each_other():
    """Two hosts exchange messages while an average flows between them: each has half of the links."""
    model = replace(MODEL, num_hosts=2, average_overhead_seconds=0.0)
    model = replace(model, average_overhead_seconds_per_doubling=0.0, average_seconds_per_byte=0.0)
    model = replace(model, put_overhead_seconds=0.0, put_seconds_per_byte=0.0)
    topology, average_bytes = build_topology("ring", 2), 400_000
    for received, averaged, num_bytes in simulated_cluster(model).run(
        push(topology, 100_000, average_bytes=average_bytes)
    ):
        assert received == pytest.approx(2 * 8 * num_bytes / RATE + 2 * LATENCY, rel=1e-9)
        # All bytes of both have to pass; a ring of two has two latencies.
        expected = 8 * (num_bytes + average_bytes) / RATE + 2 * LATENCY
        assert averaged == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (3, 1), (8, 1), (4, 2), (3, 4), (2, 8)])
def test_the_closed_form_of_a_ring_is_the_time_of_its_messages(num_hosts, ranks_per_host):
    model = replace(
        MODEL,
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        average_overhead_seconds=0.0,
        average_overhead_seconds_per_doubling=0.0,
        average_seconds_per_byte=0.0,
        averages_hosts_first=False,
    )
    num_bytes = 1_000_000
    messages = ring_allreduce([model.host_of(rank) for rank in range(model.num_ranks)], num_bytes)
    last = max(arrival_seconds(messages, num_hosts, bits_per_second=RATE, latency_seconds=LATENCY))
    closed_form = model.average_seconds(num_bytes, model.num_ranks)
    assert last <= closed_form * (1 + 1e-9)
    if ranks_per_host == 1:
        assert last == pytest.approx(closed_form, rel=1e-9)


NUM_STEPS = 8
COMPUTE = 0.5
NUM_WEIGHTS = 50_000


def step_ends(make_algorithm, cluster, compute=lambda rank, step: COMPUTE):
    """When each rank ends each of its steps, counted from when it is set up."""

    def body(communicator):
        model = nn.Linear(NUM_WEIGHTS, 1, bias=False)
        algorithm = make_algorithm(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator)
        communicator.barrier()
        start, ends = communicator.clock.now(), []
        for step in range(NUM_STEPS):
            communicator.clock.sleep(compute(communicator.rank, step))
            model(torch.ones(1, NUM_WEIGHTS)).sum().backward()
            algorithm.step(num_samples=1)
            ends.append(communicator.clock.now() - start)
        algorithm.finish()
        algorithm.close()
        return ends

    return cluster.run(body)


def iteration_seconds(ends):
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def test_synchronous_sgd_takes_compute_and_average():
    for ends in step_ends(AllReduceSGD, simulated_cluster(MODEL)):
        average = MODEL.average_seconds(4 * NUM_WEIGHTS, 4)
        # Equal batches still have their samples counted, in a small average that costs only messages.
        assert COMPUTE + average <= iteration_seconds(ends) <= COMPUTE + average + 10 * LATENCY


def test_lasgd_hides_an_average_that_is_shorter_than_its_step():
    def make(model, optimizer, communicator):
        return LASGD(model, optimizer, communicator, LASGDSettings(tau_max=1))

    average = MODEL.average_seconds(4 * NUM_WEIGHTS, 4)
    assert average < COMPUTE
    for ends in step_ends(make, simulated_cluster(MODEL)):
        assert iteration_seconds(ends) == pytest.approx(COMPUTE, rel=1e-9)
    slow = replace(MODEL, link_bits_per_second=RATE / 4)
    for ends in step_ends(make, simulated_cluster(slow)):
        # The payload has a tail of counters behind the weights.
        expected = slow.average_seconds(4 * NUM_WEIGHTS, 4)
        assert expected <= iteration_seconds(ends) <= 1.01 * expected


@pytest.mark.parametrize("num_peers", [1, 2])
def test_sgp_takes_compute_and_messages_and_osgp_hides_them(num_peers):
    def make(tau):
        def sgp(model, optimizer, communicator):
            return SGP(model, optimizer, communicator, SGPSettings(tau=tau, num_peers=num_peers), seed=0)

        return sgp

    message = put_seconds(4 * NUM_WEIGHTS, 1 / num_peers)
    for ends in step_ends(make(0), simulated_cluster(MODEL)):
        assert COMPUTE + message <= iteration_seconds(ends) <= COMPUTE + 1.01 * message
    for ends in step_ends(make(1), simulated_cluster(MODEL)):
        assert iteration_seconds(ends) == pytest.approx(
            COMPUTE, rel=1e-4
        )  # asking done() passes microseconds


def test_a_straggler_delays_in_one_round_only_those_that_it_sends_to():
    def late(rank, step):
        return COMPUTE + (1.0 if (rank, step) == (0, 0) else 0.0)

    def sgp(model, optimizer, communicator):
        return SGP(model, optimizer, communicator, SGPSettings(), seed=0)

    first = [ends[0] for ends in step_ends(sgp, simulated_cluster(MODEL), late)]
    undelayed = COMPUTE + put_seconds(4 * NUM_WEIGHTS)
    assert [end > undelayed + 0.5 for end in first] == [True, True, False, False]


def test_a_transport_replaces_given_times():
    with pytest.raises(ValueError, match="decides all times"):
        SimulatedCluster(2, jitter=1.0, transport=lambda scheduler: None)
    with pytest.raises(ValueError, match="take 1 to 4"):
        simulated_cluster(MODEL, num_ranks=5)
