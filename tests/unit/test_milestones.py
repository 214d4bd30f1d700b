"""Milestones: every multiple of every interval once, in order, the end last; also after a restart anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.settings import TrainingSettings
from pushreduce.training.milestones import Milestones

intervals = st.sampled_from([0.1, 0.3, 1 / 3, 0.7, 1.0, 2.5, 7.0, 1000.0])


def milestones(epochs, evaluate, checkpoint, num_train_samples=600):
    settings = TrainingSettings(
        epochs=epochs, evaluate_every_epochs=evaluate, checkpoint_every_epochs=checkpoint
    )
    return Milestones(settings, num_train_samples)


def walk(current):
    passed = []
    while not current.ended:
        passed.append((current.next / 600, current.next_actions))
        current.pass_next()
    return passed


@given(st.sampled_from([0.25, 1.0, 2.0, 3.7, 12.0]), intervals, intervals)
def test_every_multiple_once_and_both_at_the_end(epochs, evaluate, checkpoint):
    passed = walk(milestones(epochs, evaluate, checkpoint))
    where = [epoch for epoch, _ in passed]
    assert where == sorted(where)
    assert where[-1] == pytest.approx(epochs, abs=1 / 600)
    assert set(passed[-1][1]) == {"evaluate", "checkpoint"}
    for action, interval in (("evaluate", evaluate), ("checkpoint", checkpoint)):
        due = [epoch for epoch, actions in passed if action in actions]
        expected = [k * interval for k in range(1, int(epochs / interval + 1e-9) + 1)]
        if not expected or expected[-1] < epochs - 1e-9:
            expected.append(epochs)
        assert due == pytest.approx(expected, abs=1 / 600)  # a whole sample


@given(intervals, intervals, st.integers(0, 30))
def test_a_restart_anywhere_changes_nothing(evaluate, checkpoint, num_before):
    undisturbed = walk(milestones(3.0, evaluate, checkpoint))
    first = milestones(3.0, evaluate, checkpoint)
    for _ in range(min(num_before, len(undisturbed))):
        first.pass_next()
    second = milestones(3.0, evaluate, checkpoint)
    second.load_state_dict(first.state_dict())
    assert walk(second) == undisturbed[num_before:]


def test_a_longer_run_goes_on_at_the_next_multiples():
    first = milestones(7.0, 2.0, 5.0)
    walk(first)
    longer = milestones(20.0, 2.0, 5.0)
    longer.load_state_dict(first.state_dict())
    passed = walk(longer)
    assert [epoch for epoch, actions in passed if "checkpoint" in actions] == pytest.approx([10, 15, 20])
    assert [epoch for epoch, actions in passed if "evaluate" in actions] == pytest.approx(
        [8, 10, 12, 14, 16, 18, 20]
    )
