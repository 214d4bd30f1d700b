"""The simulated mailbox as its user meets it: times, beginning, end, and the misuse that it notices."""

import numpy as np
import pytest

from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.communication.topology import build_topology

PAYLOAD_BYTES = 24
RING = build_topology("ring", 3)


def nothing(message):
    raise AssertionError(f"nothing was to arrive, but {message} did")


def opened(communicator, topology=RING):
    return communicator.open_mailbox(topology, num_payload_bytes=PAYLOAD_BYTES, num_slot_rounds=2)


def send(mailbox, round_number):
    (to,) = mailbox.topology.out_neighbours(mailbox.rank, round_number)
    assert mailbox.reserve(round_number, to)
    mailbox.outgoing()[:] = mailbox.rank
    mailbox.send(round_number, [to], 0.5)


def receive(mailbox, own_round):
    messages = []
    mailbox.wait(lambda: mailbox.num_rounds_received > own_round, own_round, messages.append)
    return messages


def test_a_put_takes_its_time_and_its_counter_another():
    def body(communicator):
        mailbox = opened(communicator)
        start = communicator.clock.now()
        send(mailbox, 0)
        assert communicator.clock.now() == start
        (message,) = receive(mailbox, 0)
        assert (message.round_number, message.source, message.weight) == (0, (communicator.rank - 1) % 3, 0.5)
        assert message.payload.tolist() == [message.source] * PAYLOAD_BYTES
        return communicator.clock.now() - start, mailbox.num_message_bytes

    cluster = SimulatedCluster(3, put_seconds=lambda num_bytes, size: num_bytes * size)
    for seconds, num_message_bytes in cluster.run(body):
        assert seconds == pytest.approx(3 * num_message_bytes + 3 * 8)


def test_a_message_from_the_future_waits_for_its_receivers_round():
    def body(communicator):
        mailbox = opened(communicator)
        for round_number in range(2):
            send(mailbox, round_number)
            communicator.clock.sleep(1.0)
            mailbox.receive(round_number - 1, nothing)
            assert not mailbox.has_news()
            assert [message.round_number for message in receive(mailbox, round_number)] == [round_number]
            assert not mailbox.has_news()
        mailbox.free()

    SimulatedCluster(3, jitter=1.0).run(body)


def test_a_skip_goes_out_once_the_slot_is_granted_and_is_no_message():
    """Rank 2 does not receive for ten seconds: rank 1 gives up round 2, at once or after its patience, and goes on."""

    def body(communicator):
        mailbox = opened(communicator)
        for round_number in range(2):
            send(mailbox, round_number)
        if communicator.rank != 2:
            for own_round in range(2):
                receive(mailbox, own_round)
        start = communicator.clock.now()
        if communicator.rank == 1:
            assert not mailbox.reserve(2, 2, patience_seconds=0.0)
            assert communicator.clock.now() == start
            assert not mailbox.reserve(2, 2, patience_seconds=3.0)
            assert communicator.clock.now() == start + 3.0
            mailbox.skip(2, 2)
            assert communicator.clock.now() == start + 3.0
        elif communicator.rank == 2:
            communicator.clock.sleep(10.0)
            assert [len(receive(mailbox, own_round)) for own_round in range(2)] == [1, 1]
            send(mailbox, 2)
            assert not receive(mailbox, 2)
        else:
            send(mailbox, 2)
        if communicator.rank != 2:
            assert len(receive(mailbox, 2)) == 1
        mailbox.free()

    SimulatedCluster(3, jitter=1.0).run(body)


def test_outgoing_waits_for_a_buffer_that_has_left():
    """With one slot round there is one buffer; the next receiver grants its slot whether it has left or not."""

    def body(communicator):
        graph = build_topology("exponential", 4)
        mailbox = communicator.open_mailbox(graph, num_payload_bytes=PAYLOAD_BYTES, num_slot_rounds=1)
        waited_seconds = 0.0
        for round_number in range(10):
            (to,) = graph.out_neighbours(communicator.rank, round_number)
            assert mailbox.reserve(round_number, to)
            granted = communicator.clock.now()
            mailbox.outgoing()[:] = communicator.rank
            waited_seconds += communicator.clock.now() - granted
            mailbox.send(round_number, [to], 0.5)
            (message,) = receive(mailbox, round_number)
            assert message.payload.tolist() == [message.source] * PAYLOAD_BYTES
        mailbox.free()
        return waited_seconds

    assert max(SimulatedCluster(4, jitter=3.0).run(body)) > 0.0


def test_two_mailboxes_are_apart():
    def body(communicator):
        first, second = opened(communicator), opened(communicator)
        send(second, 0)
        assert len(receive(second, 0)) == 1
        first.receive(0, nothing)
        first.free()
        send(second, 1)
        assert len(receive(second, 1)) == 1

    SimulatedCluster(3, jitter=1.0).run(body)


def test_a_rank_may_send_before_its_receiver_has_begun():
    def body(communicator):
        mailbox = opened(communicator)
        communicator.clock.sleep(float(communicator.rank))
        mailbox.begin_at(5)
        assert mailbox.num_rounds_received == 5
        send(mailbox, 5)
        assert len(receive(mailbox, 5)) == 1
        assert mailbox.num_rounds_received == 6
        mailbox.free()

    SimulatedCluster(3, jitter=1.0).run(body)


# -- end


def test_free_is_collective_idempotent_and_the_end():
    def body(communicator):
        mailbox = opened(communicator)
        communicator.clock.sleep(float(communicator.rank))
        mailbox.free()
        assert communicator.clock.now() >= 2.0
        mailbox.free()
        for use in (
            lambda: mailbox.receive(0, nothing),
            lambda: mailbox.reserve(0, (communicator.rank + 1) % 3),
            mailbox.outgoing,
            lambda: mailbox.send(0, [], 1.0),
            lambda: mailbox.skip(0, (communicator.rank + 1) % 3),
        ):
            with pytest.raises(RuntimeError, match="has been freed"):
                use()

    SimulatedCluster(3, jitter=1.0).run(body)


def test_free_with_a_message_unread_is_noticed():
    def body(communicator):
        mailbox = opened(communicator)
        send(mailbox, 0)
        communicator.clock.sleep(1.0)
        mailbox.free()

    with pytest.raises(AssertionError, match=r"rank \d frees its mailbox with its slot of round 0 unread"):
        SimulatedCluster(3).run(body)


# -- misuse


def test_a_message_changed_under_way_is_noticed():
    def body(communicator):
        mailbox = opened(communicator)
        (to,) = RING.out_neighbours(communicator.rank, 0)
        mailbox.reserve(0, to)
        payload = mailbox.outgoing()
        payload[:] = 1
        mailbox.send(0, [to], 0.5)
        if communicator.rank == 1:
            payload[3] = 2
        receive(mailbox, 0)

    with pytest.raises(AssertionError, match="rank 1 changed its message of round 0 to 2 under way"):
        SimulatedCluster(3).run(body)


def test_a_slot_is_written_once_a_round():
    def body(communicator):
        mailbox = opened(communicator)
        send(mailbox, 0)
        send(mailbox, 0)

    with pytest.raises(
        AssertionError, match=r"rank \d writes its message of round 0 .* holds round 0, unread"
    ):
        SimulatedCluster(3).run(body)


def test_only_who_is_scheduled_may_reserve():
    def body(communicator):
        opened(communicator).reserve(0, (communicator.rank - 1) % 3)

    with pytest.raises(AssertionError, match=r"\d expects nothing"):
        SimulatedCluster(3).run(body)


def test_ranks_must_open_alike():
    def body(communicator):
        communicator.open_mailbox(RING, num_payload_bytes=8 * (1 + communicator.rank), num_slot_rounds=2)

    with pytest.raises(ValueError, match=r"rank \d calls open_mailbox.*must agree"):
        SimulatedCluster(3).run(body)


def test_payloads_are_aligned_for_any_number_of_bytes():
    def body(communicator):
        mailbox = communicator.open_mailbox(RING, num_payload_bytes=8 + communicator.size, num_slot_rounds=2)
        assert mailbox.num_message_bytes % 64 == 0
        assert mailbox.outgoing().view(np.uint8).shape == (11,)

    SimulatedCluster(3).run(body)
