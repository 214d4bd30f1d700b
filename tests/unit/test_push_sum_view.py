"""The oracle of SGP: by hand, against message passing, its invariants, and traces that it must refuse."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from push_sum_reference import (
    BOTH,
    PAIR,
    PROMPT,
    SLOW,
    Reference,
    apply,
    average,
    changed,
    quadratic,
    references,
    replayed,
    send,
    step,
    view,
    wavy,
)

from pushreduce.communication.topology import build_topology
from pushreduce.simulation import replay
from pushreduce.simulation.global_view import SGD
from pushreduce.simulation.push_sum_view import mass_drift, replay_sgp, replay_sgp_by_event

# -- by hand


@pytest.mark.parametrize("function", BOTH)
def test_two_ranks_without_delay(function):
    traces = [
        [step(0), send(0, [1 - r]), apply(0, 0, 1 - r), step(1), send(1, [1 - r]), apply(1, 1, 1 - r)]
        for r in (0, 1)
    ]
    # 4 -> 2 and 6 -> 4 and 4, twice.
    assert view(function, traces, PAIR).tolist() == [[4.0], [4.0]]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    ("trace", "biased", "expected"),
    [
        # Round 0: 2 and 6 with w = 1; sent, (x, w) = (1, 1/2) and (3, 1/2). Rank 0 adds (3, 1/2): (4, 1).
        # Round 1: z = 4: x = 4 - 2 = 2. Rank 1: z = 6: x = 3 + 1 = 4. Halves: (1, 1/2) and (2, 1/4).
        # Rank 0: (1 + 2, 3/4); rank 1: (2 + 1 + 1, 1/4 + 1/2 + 1/2).
        (SLOW, False, [4.0, 3.2]),
        # Biased, rank 1's gradient is taken at x = 3: x = 3 + 2.5 = 5.5. Rank 0: 1 + 2.75; rank 1: 2.75 + 1 + 1.
        (SLOW, True, [3.75, 4.75]),
    ],
)
def test_two_ranks_with_a_delay(function, trace, biased, expected):
    z = view(function, [PROMPT, trace], PAIR, tau=1, biased=biased)
    np.testing.assert_allclose(z[:, 0], expected, rtol=1e-15)


def one_displacement(by_rank):
    """A gradient that moves the ranks from 0 by these at step 0 and a learning rate of 1, and then no more."""
    return lambda rank, s, z: -np.full_like(z, by_rank[rank] if s == 0 else 0.0)


@pytest.mark.parametrize("function", BOTH)
def test_three_ranks_on_the_exponential_graph(function):
    traces = [
        [
            step(0, rate=1.0),
            *(send(0, [(r + 1) % 3]), apply(0, 0, (r - 1) % 3)),
            *(send(1, [(r + 2) % 3]), apply(1, 1, (r - 2) % 3)),
        ]
        for r in range(3)
    ]
    # 0, 4, 8; hop 1: 0 + 4, 2 + 0, 4 + 2; hop 2: 2 + 1, 1 + 3, 3 + 2.
    z = view(function, traces, build_topology("exponential", 3), one_displacement([0, 4, 8]), x0=[0.0])
    assert z[:, 0].tolist() == [3.0, 4.0, 5.0]


def test_mass_of_a_message_left_out_is_kept():
    third = 1 / 3
    traces = [
        [step(0, rate=1.0), send(0, [1], third), apply(0, 0, 1), apply(0, 0, 2)],
        [step(0, rate=1.0), send(0, [0, 2], third), apply(0, 0, 0), apply(0, 0, 2)],
        [step(0, rate=1.0), send(0, [1, 0], third), apply(0, 0, 1)],
    ]
    # 3, 6, 9: rank 0 keeps (2, 2/3) and gets 2 + 3; rank 1 keeps 2, gets 1 + 3; rank 2 keeps 3, gets 2, w = 2/3.
    complete, gradient = build_topology("complete", 3), one_displacement([3, 6, 9])
    for function, options in ((replay_sgp, {"may_skip": True}), (replay_sgp_by_event, {})):
        z = view(function, traces, complete, gradient, x0=[0.0], **options)
        np.testing.assert_allclose(z[:, 0], [21 / 4, 6, 15 / 2], rtol=1e-15)


@pytest.mark.parametrize("function", BOTH)
def test_averaged_rounds_weigh_by_samples_and_take_idle_ranks_along(function):
    ends = [[send(3, [1 - r], m=0), apply(3, 0, 1 - r)] for r in (0, 1)]
    traces = [
        [average(0, 0, 3), average(1, None, 0), average(2, None, 0), *ends[0]],
        [average(0, 0, 1), average(1, 1, 5), average(2, None, 0), *ends[1]],
    ]
    # 3/4 x 4 - 1/4 x 4 = 2: x = 3; then 3 - 8 = -5, v = -4: x = 5; then nobody.
    z = view(function, traces, PAIR, rule=SGD(momentum=0.5), average_rounds=3)
    assert z[:, 0].tolist() == [5.0, 5.0]


# -- against message passing


@settings(max_examples=150)
@given(references())
def test_both_replays_equal_message_passing(reference):
    traces, z, _, w = reference.run()
    for function in BOTH:
        np.testing.assert_allclose(replayed(function, reference, traces), z, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(w.sum(), len(w), rtol=1e-13)
    assert (w > 0).all()


@settings(max_examples=75)
@given(references(eager=True))
def test_events_are_followed_in_any_order(reference):
    traces, z, _, _ = reference.run()
    np.testing.assert_allclose(replayed(replay_sgp_by_event, reference, traces), z, rtol=1e-11, atol=1e-12)


@settings(max_examples=75)
@given(references(gradient=lambda rank, s, z: np.full_like(z, 1.0 + rank), momentum=0.0))
def test_constant_gradients_move_the_mean_by_the_learning_rate_under_every_delay(reference):
    traces, *_ = reference.run()
    steps = reference.learning_rate * sum(
        (1 + rank) * (len([e for e in trace if e["event"] == "step"])) for rank, trace in enumerate(traces)
    )
    n = len(traces)
    for k in range(min(reference.average_rounds, reference.num_rounds)):
        samples = [trace[k]["num_samples"] for trace in traces]
        if sum(samples):
            steps += n * reference.learning_rate * np.average(np.arange(1, n + 1), weights=samples)
    for function in BOTH:
        x = replayed(function, reference, traces, biased=True)  # gradients do not depend on z
        np.testing.assert_allclose(x.mean(axis=0), reference.x0 - steps / n, rtol=1e-12, atol=1e-12)


@settings(max_examples=50)
@given(references(gradient=lambda rank, s, z: np.zeros_like(z), momentum=0.0))
def test_without_gradients_weights_are_conserved_and_models_stay(reference):
    traces, *_, w = reference.run()
    reference.x0 = np.ones(2)  # numerators then do what weights do
    for function in BOTH:
        x = replayed(function, reference, traces, biased=True)
        np.testing.assert_allclose(x[:, 0], w, rtol=1e-12)
        np.testing.assert_allclose(replayed(function, reference, traces, biased=False), 1.0, rtol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_exponential_agrees_exactly_after_log2_n_rounds(n):
    rng = np.random.default_rng(n)
    displacements = rng.integers(-100, 100, n) * 1.0
    num_rounds = n.bit_length() - 1
    reference = Reference(
        build_topology("exponential", n),
        np.zeros(1),
        one_displacement(displacements),
        [1] * n,
        rng,
        num_rounds,
    )
    reference.learning_rate = 1.0
    traces, *_ = reference.run()
    for function in BOTH:
        assert (replayed(function, reference, traces) == displacements.mean()).all()


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("sends", [False, True])
def test_one_rank_is_plain_sgd(function, sends):
    rule, plain = SGD(0.9, True, 1e-3), np.array([3.0, -1.0])
    trace = []
    for k in range(5):
        trace += [step(k)] + [send(k, [], 1.0)] * sends
    z = view(function, [trace], build_topology("exponential", 1), wavy, x0=plain, rule=rule)
    for k in range(5):
        plain = rule.update(plain, wavy(0, k, plain), 0.5)
    np.testing.assert_allclose(z[0], plain, rtol=1e-14)


def test_mass_drift_finds_what_is_lost():
    nodes = np.array([[3.0, 1.0, 1.0], [-1.0, 2.0, 0.5], [0.0, 1.0, 0.5]])
    mass, turnover = np.array([2.0, 4.0, 2.0]), np.array([8.0, 4.0, 2.0])
    assert mass_drift(nodes, mass, turnover) == 0
    assert mass_drift(nodes, mass + np.array([0.0, 0.0, 1.0]), turnover) == 0.5
    assert mass_drift(nodes, mass - np.array([1.0, 0.0, 0.0]), turnover) == 0.125


@pytest.mark.parametrize("function", BOTH)
def test_a_run_that_converges_to_zero_has_lost_nothing(function):
    num_rounds = 200
    rng, complete = np.random.default_rng(0), build_topology("complete", 3)
    reference = Reference(
        complete, np.full(2, 1e3), lambda rank, s, z: 5.0 * z, [num_rounds] * 3, rng, num_rounds, tau=2
    )
    traces, z, *_ = reference.run()
    assert np.abs(z).max() < 1e-12
    np.testing.assert_allclose(replayed(function, reference, traces), z, atol=1e-12)


# -- a run's settings


def run_settings(**sgp):
    defaults = {
        "graph": "ring",
        "num_peers": 1,
        "two_peer_rounds": 0,
        "average_rounds": 0,
        "tau": 1,
        "biased": False,
        "wire_dtype": "full",
        "slot_patience_seconds": None,
    }
    return SimpleNamespace(seed=0, sgp=SimpleNamespace(**defaults | sgp))


def test_a_runs_settings_choose_the_replay():
    def of_run(traces, **sgp):
        return replay._replay_sgp(np.array([4.0]), traces, quadratic, SGD(), run_settings(**sgp))

    for patience in (None, 0.0):
        z = of_run([PROMPT, SLOW], slot_patience_seconds=patience)
        np.testing.assert_allclose(z[:, 0], [4.0, 3.2], rtol=1e-15)
    kept = [changed(PROMPT, 1, send(0, [])), changed(SLOW, 4)]
    assert np.isfinite(of_run(kept, slot_patience_seconds=0.0)).all()
    with pytest.raises(ValueError, match="left out"):
        of_run(kept)
    with pytest.raises(ValueError, match=r"--wire-dtype bfloat16 .*trace with full"):
        of_run([PROMPT, SLOW], wire_dtype="bfloat16")
