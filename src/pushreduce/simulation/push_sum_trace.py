"""What a trace of SGP says, and the rules that it must keep.

Owns the checks; the arithmetic is `push_sum_view.py`'s. Like the rest of the oracle it shares only the topology with
the program. Events, one list a rank in that rank's order (rounds k count optimizer steps, sending rounds m what is
sent; m belongs to k = average_rounds + m max(1, tau)):

    {"event": "average", "round": k, "step": s, "num_samples": b, "learning_rate": eta}
        k < average_rounds: a step with the gradients' mean over all ranks. b = 0, step null: contributes nothing
    {"event": "step", "round": k, "step": s, "num_samples": b, "learning_rate": eta}
        gradient s of the rank, counted from 0, at z; absent in rounds that a rank takes without a gradient
    {"event": "send", "round": k, "sending_round": m, "to": [j, ...], "share": p}
        x_j and w_j are to receive p x and p w for each j in "to", the rank keeps 1 - p len(to)
    {"event": "apply", "round": k, "sending_round": m, "source": i}
        the message of sending round m from i is added; k is the receiver's own round
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pushreduce.communication.topology import Topology
from pushreduce.simulation.global_view import Event, reject


class Message(NamedTuple):
    """Names a message; there is at most one of a name."""

    sending_round: int
    source: int
    receiver: int


@dataclass(frozen=True)
class Application:
    """When a message was added to its receiver's numerator and weight."""

    event: Event
    delay: int
    """The receiver's own round then, less the message's round; 0 to tau."""
    before_send: bool
    """Whether the receiver's own send of that round came later, and passed on a share of this at once."""


@dataclass(frozen=True)
class Rules:
    """What the settings of a run demand of its trace."""

    topology: Topology
    tau: int
    average_rounds: int
    may_skip: bool
    """Whether a rank may keep the mass of a message whose slot is not free (finite slot_patience_seconds)."""

    def round_of(self, sending_round: int) -> int:
        """The round k of a sending round m."""
        return self.average_rounds + sending_round * max(1, self.tau)


@dataclass
class RankTrace:
    """One rank's events, by round."""

    rank: int
    updates: dict[int, Event] = field(default_factory=dict)
    """Its "step" or "average" by round."""
    sends: dict[int, Event] = field(default_factory=dict)
    """By sending round."""
    applications: dict[Message, Application] = field(default_factory=dict)
    num_rounds: int = 0
    """Rounds that an event tells of; there may be more, without any."""
    num_steps: int = 0
    next_send: int = 0
    """The sending round that is due next."""


def check_trace(events: Sequence[Sequence[Event]], rules: Rules) -> list[RankTrace]:
    """The traces of all ranks by round, once they have been found to keep every rule.

    Steps, averaged rounds and sending rounds count up without gaps, the last two as far on every rank. A rank sends to
    its out-neighbours (to some of them if it may skip), the share 1 / (1 + number of out-neighbours). Every message
    sent is applied once, at its receiver, no earlier than the receiver's own round of it and at most tau rounds later.

    Raises:
        ValueError: one of these is broken; names rank and event.
    """
    traces = [RankTrace(rank) for rank in range(len(events))]
    for trace, listed in zip(traces, events, strict=True):
        for event in listed:
            _add(trace, event, rules)
    num_rounds = max(trace.num_rounds for trace in traces)
    for trace, listed in zip(traces, events, strict=True):
        last = listed[-1] if listed else {}
        _check_all_sent(trace, last, num_rounds, rules)
        missing = set(range(min(rules.average_rounds, num_rounds))) - trace.updates.keys()
        if missing:
            reject(trace.rank, last, f"the averaged round {min(missing)}, which others take, is missing")
    for trace in traces:
        for message, application in trace.applications.items():
            send = traces[message.source].sends.get(message.sending_round)
            if send is None or trace.rank not in send["to"]:
                reject(trace.rank, application.event, f"rank {message.source} never sent it")
        for m, send in trace.sends.items():
            for receiver in send["to"]:
                if Message(m, trace.rank, receiver) not in traces[receiver].applications:
                    reject(trace.rank, send, f"rank {receiver} never applies it")
    return traces


def _add(trace: RankTrace, event: Event, rules: Rules) -> None:
    """Checks all that a rank's own events tell of `event`, and enters it."""
    match event:
        case {"event": "average", "round": k, "step": s, "num_samples": b, "learning_rate": _}:
            if k != trace.num_rounds or k >= rules.average_rounds:
                reject(
                    trace.rank, event, f"round {trace.num_rounds} of {rules.average_rounds} averaged is next"
                )
            _check_step(trace, event, s, contributes=b > 0)
            trace.updates[k] = event
        case {"event": "step", "round": k, "step": s, "num_samples": b, "learning_rate": _}:
            if k < max(trace.num_rounds, rules.average_rounds):
                reject(
                    trace.rank, event, f"round {max(trace.num_rounds, rules.average_rounds)} or later is next"
                )
            if b <= 0:
                reject(trace.rank, event, "a step has samples")
            _check_all_sent(trace, event, k, rules)
            _check_step(trace, event, s, contributes=True)
            trace.updates[k] = event
        case {"event": "send", "round": k, "sending_round": m, "to": to, "share": share}:
            _check_round(trace, event, k, rules)
            _check_send(trace, event, m, to, share, rules)
            trace.sends[m] = event
            trace.next_send = m + 1
        case {"event": "apply", "round": k, "sending_round": m, "source": source}:
            _check_round(trace, event, k, rules)
            message = Message(m, source, trace.rank)
            if m < 0 or source not in rules.topology.in_neighbours(trace.rank, m):
                reject(trace.rank, event, f"rank {source} sends nothing to this rank in sending round {m}")
            if message in trace.applications:
                reject(trace.rank, event, "the message has been applied already")
            delay = k - rules.round_of(m)
            if not 0 <= delay <= rules.tau:
                reject(trace.rank, event, f"delay {delay}: 0 to tau = {rules.tau} is allowed")
            trace.applications[message] = Application(event, delay, _has_still_to_send(trace, k, rules))
        case _:
            reject(trace.rank, event, "this is no event of SGP")
    trace.num_rounds = k + 1


def _check_step(trace: RankTrace, event: Event, step: int | None, *, contributes: bool) -> None:
    expected = trace.num_steps if contributes else None
    if step != expected:
        reject(trace.rank, event, f"its step is {expected}")
    trace.num_steps += contributes


def _check_round(trace: RankTrace, event: Event, k: int, rules: Rules) -> None:
    if k < trace.num_rounds - 1:
        reject(trace.rank, event, f"the rank is in round {trace.num_rounds - 1} already")
    _check_all_sent(trace, event, k, rules)


def _check_all_sent(trace: RankTrace, event: Event, num_rounds: int, rules: Rules) -> None:
    """All sends due in rounds below `num_rounds` are there; with nobody to send to, there need be none."""
    while (due := rules.round_of(trace.next_send)) < num_rounds:
        if rules.topology.out_neighbours(trace.rank, trace.next_send):
            reject(
                trace.rank,
                event,
                f"before it the send of round {due} is missing, or the trace ends too early",
            )
        trace.next_send += 1


def _has_still_to_send(trace: RankTrace, k: int, rules: Rules) -> bool:
    m = trace.next_send
    return rules.round_of(m) == k and bool(rules.topology.out_neighbours(trace.rank, m))


def _check_send(trace: RankTrace, event: Event, m: int, to: list[int], share: float, rules: Rules) -> None:
    if m != trace.next_send or event["round"] != rules.round_of(m):
        due = rules.round_of(trace.next_send)
        reject(trace.rank, event, f"sending round {trace.next_send}, of round {due}, is next")
    scheduled = rules.topology.out_neighbours(trace.rank, m)
    if len(set(to)) < len(to) or not set(to) <= set(scheduled):
        reject(trace.rank, event, f"the topology has the receivers {list(scheduled)}")
    if len(to) < len(scheduled) and not rules.may_skip:
        reject(
            trace.rank, event, f"{sorted(set(scheduled) - set(to))} left out, but this policy waits for all"
        )
    if to and not math.isclose(share, 1 / (1 + len(scheduled)), rel_tol=1e-15):
        reject(trace.rank, event, f"the share with {len(scheduled)} receivers is 1/{1 + len(scheduled)}")
