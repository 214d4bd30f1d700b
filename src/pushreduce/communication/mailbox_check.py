"""The rehearsal before a run: do messages arrive whole, once, and in the right slot, between the real neighbours?

Some MPIs lose what is put into their windows, silently. Works on any `Mailbox`; owns what is sent, what is expected,
and that nothing waits for ever for a message that was lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pushreduce.communication.mailbox import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Bytes,
    Mailbox,
    MailboxError,
    Message,
    WaitUntil,
)

LIMIT_SECONDS = 20.0
"""A wait that takes longer counts as for ever; a rehearsal that goes well takes a fraction of a second."""
_NUM_BYTES = 4 << 20  # a rank sends in all: a third of a second at 100 Mbit/s
_MAX_PERIOD = 16
_TOLERANCE = 1e-9


class WaitedTooLongError(MailboxError):
    """What is waited for has not come, and may never come."""


class LimitedWait:
    """A `wait_until` whose waits are not to last longer than `limit_seconds`, or raise WaitedTooLongError."""

    def __init__(self, wait_until: WaitUntil) -> None:
        self._wait_until = wait_until
        self.limit_seconds = math.inf

    def __call__(self, predicate: Callable[[], bool], timeout_seconds: float) -> bool:
        is_true = self._wait_until(predicate, min(timeout_seconds, self.limit_seconds))
        if not is_true and timeout_seconds > self.limit_seconds:
            raise WaitedTooLongError(f"nothing came for {self.limit_seconds:g} s")
        return is_true


def find_problem(mailbox: Mailbox, allgather: Callable[[Any], list[Any]]) -> str:
    """What is wrong with a mailbox that has not been used: one clause, or "". Collective; the same on all ranks.

    Rounds of PushSum over at least one period of the topology (up to 16 rounds), and over every slot more than once.
    The mailbox has been used afterwards. Where messages are lost this returns only if the mailbox's waits are limited.
    """
    problem, is_wait, weight = "", False, math.nan
    try:
        weight = _rehearse(mailbox)
    except MailboxError as error:
        problem, is_wait = f"rank {mailbox.rank}: {error}", isinstance(error, WaitedTooLongError)
    outcomes = allgather((problem, is_wait, weight))
    # Where a rank has found something, others wait for it in vain.
    for problem, *_ in sorted(outcomes, key=lambda outcome: outcome[1]):
        if problem:
            return problem
    total = math.fsum(weight for *_, weight in outcomes)
    if abs(total - len(outcomes)) > _TOLERANCE * len(outcomes):
        return f"the weights of {len(outcomes)} ranks sum to {total!r}"
    return ""


def num_rounds(mailbox: Mailbox) -> int:
    """Rounds of a rehearsal."""
    period = mailbox.topology.period or _MAX_PERIOD // 2
    return max(min(period, _MAX_PERIOD), 2 * mailbox.num_slot_rounds)


def num_end_bytes(mailbox: Mailbox) -> int:
    """Bytes at each end of a message that are looked at, a multiple of 64; of shorter messages all."""
    per_message = _NUM_BYTES // (num_rounds(mailbox) * mailbox.num_places)
    return max(per_message // 2 // 64, 8) * 64


def _rehearse(mailbox: Mailbox) -> float:
    """This rank's weight after the last round."""
    pattern = _Pattern(mailbox)
    weight = 1.0

    def apply(message: Message) -> None:
        nonlocal weight
        pattern.check(message)
        weight += message.weight

    def received(round_number: int) -> Callable[[], bool]:
        return lambda: mailbox.num_rounds_received > round_number

    for round_number in range(num_rounds(mailbox)):
        receivers = mailbox.topology.out_neighbours(mailbox.rank, round_number)
        for to in receivers:
            mailbox.reserve(round_number, to)
        if receivers:
            pattern.write(mailbox.outgoing(), mailbox.rank, round_number)
            share = weight / (1 + len(receivers))
            mailbox.send(round_number, receivers, share)
            weight -= len(receivers) * share
        mailbox.wait(received(round_number), round_number, apply)
    return weight


class _Pattern:
    """What the payload of a rank's message of a round is."""

    def __init__(self, mailbox: Mailbox) -> None:
        size, end = mailbox.num_payload_bytes, num_end_bytes(mailbox)
        self._parts = [slice(0, size)]
        if 2 * end < mailbox.num_message_bytes:
            # Less what else is in the ends of a message, the padding of up to 63 bytes included.
            length = end - HEADER_BYTES - TRAILER_BYTES - 64
            self._parts = [slice(0, length), slice(size - length, size)]
        # Neighbouring and far bytes differ, so that a displaced message is seen.
        self._bytes = [
            (
                np.arange(part.start, part.stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                >> np.uint64(56)
            ).astype(np.uint8)
            for part in self._parts
        ]

    def write(self, payload: Bytes, source: int, round_number: int) -> None:
        for part, values in zip(self._parts, self._bytes, strict=True):
            np.add(values, _key(source, round_number), out=payload[part])

    def check(self, message: Message) -> None:
        for part, values in zip(self._parts, self._bytes, strict=True):
            wrong = message.payload[part] != values + _key(message.source, message.round_number)
            if wrong.any():
                raise MailboxError(
                    f"{int(wrong.sum())} of {len(wrong)} bytes of the message of round {message.round_number} from "
                    f"rank {message.source} are wrong"
                )


def _key(source: int, round_number: int) -> np.uint8:
    return np.uint8((source * 37 + round_number * 101 + 1) % 256)
