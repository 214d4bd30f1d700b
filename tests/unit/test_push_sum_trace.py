"""Traces of SGP that cannot be: every broken rule is refused, naming rank and event."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from push_sum_reference import (
    BOTH,
    PAIR,
    PROMPT,
    SLOW,
    apply,
    average,
    changed,
    references,
    replayed,
    send,
    step,
    view,
)

from pushreduce.simulation.push_sum_view import replay_sgp, replay_sgp_by_event


@pytest.mark.parametrize(
    ("rank", "index", "events", "message"),
    [
        (0, 2, [PROMPT[2]] * 2, "rank 0, event .*'apply'.*applied already"),
        (0, 5, [], "rank 1, event .*'send', 'round': 1.*rank 0 never applies it"),
        (0, 1, [send(0, [0])], r"rank 0, event .*receivers \[1\]"),
        (0, 1, [send(0, [1, 1])], r"rank 0, event .*receivers \[1\]"),
        (0, 1, [send(0, [])], r"rank 0, event .*\[1\] left out"),
        (0, 1, [send(0, [1], 0.4)], "rank 0, event .*share with 1 receivers is 1/2"),
        (0, 1, [], "rank 0, event .*'step', 'round': 1.*send of round 0 is missing"),
        (0, 4, [], "rank 0, event .*'apply', 'round': 1"),
        (0, 2, [apply(0, 1, 1)], "rank 0, event .*delay -1"),
        (0, 2, [apply(0, 0, 0)], "rank 0, event .*rank 0 sends nothing to this rank"),
        (0, 2, [apply(0, -1, 1)], "rank 0, event .*sends nothing"),
        (0, 0, [step(0, s=1)], "rank 0, event .*its step is 0"),
        (0, 3, [step(2, s=1)], "rank 0, event .*'step', 'round': 2.*send of round 1 is missing"),
        (0, 0, [step(0, b=0)], "rank 0, event .*has samples"),
        (0, 3, [step(0, s=1)], "rank 0, event .*round 1 or later"),
        (0, 4, [send(1, [1], m=2)], "rank 0, event .*sending round 1, of round 1, is next"),
        (0, 5, [apply(0, 0, 1)], "rank 0, event .*in round 1 already"),
        (0, 0, [average(0, 0, 1)], "rank 0, event .*of 0 averaged"),
        (0, 0, [{"event": "post", "round": 0}], "rank 0, event .*no event of SGP"),
        (1, 5, [SLOW[5], step(2), send(2, [0])], "rank 0, event .*send of round 2 is missing"),
    ],
)
@pytest.mark.parametrize("function", BOTH)
def test_what_breaks_a_rule_is_refused(function, rank, index, events, message):
    traces = [list(PROMPT), list(SLOW)]
    traces[rank] = changed(traces[rank], index, *events)
    if function is replay_sgp_by_event and "left out" in message:
        message = "rank 1, event .*rank 0 never sent it"
    with pytest.raises(ValueError, match=message):
        view(function, traces, PAIR, tau=1)


@pytest.mark.parametrize("function", BOTH)
def test_delays_above_tau_are_refused(function):
    with pytest.raises(ValueError, match=r"rank 1, event .*delay 1: 0 to tau = 0"):
        view(function, [PROMPT, SLOW], PAIR, tau=0)


@pytest.mark.parametrize("function", BOTH)
def test_every_rank_takes_the_averaged_rounds(function):
    with pytest.raises(ValueError, match=r"rank 1, event .*averaged round 1, which others take, is missing"):
        view(function, [[average(0, 0, 1), average(1, 1, 1)], [average(0, 0, 1)]], PAIR, average_rounds=2)


@pytest.mark.parametrize(
    ("tau", "traces", "expected"),
    [
        # 2 and 6; rank 1: (6 + 1, 3/2), sends half of it: (3.5, 3/4); rank 0: (1 + 3.5, 1/2 + 3/4).
        (0, [PROMPT[:3], [step(0), apply(0, 0, 0), send(0, [0])]], [4.5 / 1.25, 3.5 / 0.75]),
        # As SLOW, but in round 1 (4, 1/2) + (1, 1/2) = (5, 1), half of which goes to rank 0: (1 + 2.5, 1).
        (1, [PROMPT, [*SLOW[:3], apply(1, 0, 0), send(1, [0]), apply(1, 1, 0)]], [3.5, 3.5]),
    ],
)
def test_what_is_applied_before_the_own_send_is_for_the_replay_by_event(tau, traces, expected):
    with pytest.raises(ValueError, match=r"rank 1, event .*'apply'.*before the rank's own send"):
        view(replay_sgp, traces, PAIR, tau=tau)
    z = view(replay_sgp_by_event, traces, PAIR, tau=tau)
    np.testing.assert_allclose(z[:, 0], expected, rtol=1e-15)


def test_a_circle_of_messages_is_refused():
    circle = [[step(0), apply(0, 0, 1 - r), send(0, [1 - r])] for r in (0, 1)]
    with pytest.raises(ValueError, match=r"rank 0, event .*a circle"):
        view(replay_sgp_by_event, circle, PAIR)


@settings(max_examples=150)
@given(references(skip_probability=0.0), st.data())
def test_an_event_lost_or_doubled_is_refused(reference, data):
    traces, *_ = reference.run()
    rank = data.draw(st.integers(0, len(traces) - 1))
    needed = {"send", "apply", "average"}
    indices = [
        i for i, e in enumerate(traces[rank]) if e["event"] in needed and (e["event"] != "send" or e["to"])
    ]
    if len(traces) == 1 or not indices:
        return
    broken = copy.deepcopy(traces)
    index = data.draw(st.sampled_from(indices))
    if data.draw(st.booleans(), label="doubled"):
        broken[rank].insert(index, broken[rank][index])
    else:
        del broken[rank][index]
    for function in BOTH:
        with pytest.raises(ValueError, match=r"rank \d, event \{"):
            replayed(function, reference, broken)
