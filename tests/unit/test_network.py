"""The simulated network: fairness and conservation at every moment, closed forms, and an exact reference."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from max_min_reference import Transfer, arrivals

from pushreduce.simulation.event_queue import EventQueue
from pushreduce.simulation.network import Network

MAX_HOSTS = 6
ALMOST = 1e-6  # relative: rates are compared after many additions


@st.composite
def traffic(draw, max_transfers=25):
    """Link rates by host, latency, and transfers whose starts often coincide."""
    num_hosts = draw(st.integers(2, MAX_HOSTS))
    link_rates = draw(
        st.lists(st.sampled_from([1, 2, 3, 10]).map(Fraction), min_size=num_hosts, max_size=num_hosts)
    )
    pairs = st.tuples(st.integers(0, num_hosts - 1), st.integers(1, num_hosts - 1))
    starts = st.one_of(
        st.integers(0, 8).map(Fraction), st.fractions(min_value=0, max_value=8, max_denominator=97)
    )
    transfers = [
        Transfer(start, source, (source + distance) % num_hosts, num_bits)
        for start, (source, distance), num_bits in draw(
            st.lists(
                st.tuples(starts, pairs, st.sampled_from([1, 8, 12, 40]).map(Fraction)),
                min_size=1,
                max_size=max_transfers,
            )
        )
    ]
    return link_rates, draw(st.sampled_from([Fraction(0), Fraction(1, 8), Fraction(5)])), transfers


class Observed:
    """A network with its clock; `watch` sees the flows (source, target, rate, end) of every stretch of time."""

    def __init__(self, link_rates, latency_seconds):
        self.queue = EventQueue()
        self.rates = [float(rate) for rate in link_rates]
        self.network = Network(
            len(link_rates),
            bits_per_second=self.rates,
            latency_seconds=float(latency_seconds),
            now=self.queue.now,
            at=self._at,
        )
        self.moved_bits = Counter()  # (source, target) -> bits so far, by the rates seen
        self.arrival_seconds = {}
        self._seen_seconds, self._seen_flows = 0.0, []
        self.watch = lambda flows: None

    def _at(self, time_seconds, action):
        def watched():
            self._integrate()
            action()
            self._seen_flows = self.flows()

        self.queue.at(time_seconds, watched)

    def _integrate(self):
        if self.queue.now() > self._seen_seconds:
            self.watch(self._seen_flows)
        for source, target, rate, end_seconds in self._seen_flows:
            until = min(self.queue.now(), end_seconds)  # a lone flow's end is no event
            self.moved_bits[source, target] += rate * max(0.0, until - self._seen_seconds)
        self._seen_seconds = self.queue.now()

    def flows(self):
        """(source, target, rate, end) of every flow that has bits to send."""
        hosts = range(len(self.rates))
        return [
            (source, target, flow.bits_per_second, flow.end_seconds)
            for source in hosts
            for target in hosts
            for flow in self.network._up[source].flows
            if flow in self.network._down[target].flows and flow.end_seconds > self.queue.now()
        ]

    def run(self, transfers):
        """Arrival times, in the order of `transfers`."""
        for i, transfer in enumerate(transfers):
            self._at(float(transfer.start_seconds), lambda i=i: self._start(i, transfers[i]))
        self.queue.run()
        return [self.arrival_seconds[i] for i in range(len(transfers))]

    def _start(self, i, transfer):
        self.network.transfer(
            transfer.source, transfer.target, float(transfer.num_bits) / 8, lambda: self._arrive(i)
        )

    def _arrive(self, i):
        assert i not in self.arrival_seconds
        self.arrival_seconds[i] = self.queue.now()


@settings(max_examples=100)
@given(traffic())
def test_equal_to_progressive_filling_in_fractions(case):
    link_rates, latency, transfers = case
    expected = [float(time) for time in arrivals(transfers, link_rates, latency)]
    assert Observed(link_rates, latency).run(transfers) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100)
@given(traffic())
def test_no_link_above_its_rate_and_every_flow_has_a_bottleneck_at_every_moment(case):
    link_rates, latency, transfers = case
    observed = Observed(link_rates, latency)

    def watch(flows):
        load, highest = Counter(), Counter()
        for source, target, rate, _ in flows:
            for link in (("up", source), ("down", target)):
                load[link] += rate
                highest[link] = max(highest[link], rate)
        full = {link for link in load if load[link] >= observed.rates[link[1]] * (1 - ALMOST)}
        for link in load:
            assert load[link] <= observed.rates[link[1]] * (1 + ALMOST)
        for source, target, rate, _ in flows:
            links = {("up", source), ("down", target)}
            assert any(rate >= highest[link] * (1 - ALMOST) for link in links & full)

    observed.watch = watch
    observed.run(transfers)


@settings(max_examples=40)
@given(traffic())
def test_what_flows_is_what_was_sent(case):
    link_rates, latency, transfers = case
    observed = Observed(link_rates, latency)
    observed.run(transfers)
    sent = Counter()
    for transfer in transfers:
        sent[transfer.source, transfer.target] += float(transfer.num_bits)
    assert observed.moved_bits == pytest.approx(sent, rel=1e-9)
    assert not observed.flows()


@settings(max_examples=40)
@given(traffic(), st.randoms(use_true_random=False))
def test_the_order_of_simultaneous_transfers_does_not_matter(case, choice):
    link_rates, latency, transfers = case
    order = list(range(len(transfers)))
    choice.shuffle(order)
    straight = Observed(link_rates, latency).run(transfers)
    shuffled = Observed(link_rates, latency).run([transfers[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9)


@given(st.floats(1e-3, 1e9), st.floats(1.0, 1e11), st.floats(1.0, 1e11), st.floats(0.0, 10.0))
def test_a_lone_transfer_takes_latency_and_bytes_at_the_slower_link(num_bytes, up, down, latency):
    (arrival,) = Observed([up, down], latency).run([Transfer(0.0, 0, 1, 8 * num_bytes)])
    assert arrival == pytest.approx(latency + 8 * num_bytes / min(up, down), rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 40])
def test_many_into_one_host_take_many_times_as_long(k):
    transfers = [Transfer(0.0, 1 + i, 0, 100.0) for i in range(k)]
    assert Observed([10.0] * (k + 1), 0.5).run(transfers) == pytest.approx([0.5 + 10.0 * k] * k, rel=1e-9)


def test_directions_of_a_link_do_not_share():
    transfers = [Transfer(0.0, 0, 1, 100.0), Transfer(3.0, 1, 0, 100.0)]
    assert Observed([10.0, 10.0], 0.0).run(transfers) == pytest.approx([10.0, 13.0], rel=1e-9)


def test_a_transfer_inside_a_host_takes_no_link_and_no_time():
    transfers = [Transfer(0.0, 0, 1, 100.0), Transfer(1.0, 0, 0, 1e9), Transfer(1.0, 1, 1, 1e9)]
    assert Observed([10.0, 10.0], 2.0).run(transfers) == pytest.approx([12.0, 1.0, 1.0], rel=1e-9)


def test_nothing_but_latency_for_no_bytes():
    assert Observed([10.0, 10.0], 2.0).run([Transfer(1.0, 0, 1, 0.0)]) == [3.0]


def test_a_long_chain_of_hosts_stays_fair_while_flows_come_and_go():
    """One host sends on while what it receives is shared: a change may travel along the chain."""
    choice, num_hosts = random.Random(1), 80
    transfers = [
        Transfer(
            Fraction(choice.randrange(400), 100), i, (i + choice.choice([1, 2])) % num_hosts, Fraction(20)
        )
        for i in range(num_hosts)
    ]
    rates = [Fraction(10)] * num_hosts
    expected = [float(time) for time in arrivals(transfers, rates, Fraction(0))]
    assert Observed(rates, 0).run(transfers) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hosts": 0},
        {"bits_per_second": 0.0},
        {"bits_per_second": [1.0]},
        {"bits_per_second": [1.0, float("inf")]},
        {"latency_seconds": -1.0},
        {"latency_seconds": float("nan")},
    ],
)
def test_impossible_networks_are_refused(changes):
    queue = EventQueue()
    arguments = {"num_hosts": 2, "bits_per_second": 1.0, "latency_seconds": 0.0} | changes
    with pytest.raises(ValueError, match=r"must be positive|give one host"):
        Network(**arguments, now=queue.now, at=queue.at)
