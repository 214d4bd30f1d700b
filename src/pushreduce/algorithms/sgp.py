"""SGP, Stochastic Gradient Push: SGD at every worker, and PushSum gossip of the weights along a directed graph.

Worker i holds a numerator x_i and a weight w_i; the model is z_i = x_i / w_i, where gradients are taken. In round k,

    x_i <- x_i - gamma g(z_i)                               the optimizer runs at z_i; its step goes into x_i as it is
    x_i <- p_ii x_i + sum_j p_ij x_j,  w_i likewise         pushed to the out-neighbours of the round, received from
    z_i <- x_i / w_i                                        the in-neighbours

or, for all workers at once, X(k+1) = (X(k) - gamma grad F(Z(k))) P(k)^T (equation 6 of the SGP paper's supplement).
Synchronous SGP (tau = 0) waits for the messages of round k. Overlap SGP, OSGP(tau), sends every tau rounds, does not
wait for its sends, and at the end of round k only for what was sent in rounds up to k - tau.

The sums of x and of w over workers and messages under way never change except by gradients: a message is scaled only
once its slot at the receiver is reserved, what is not sent is kept, and evaluation drains first. One more element at
the end of x, the canary, is treated as a parameter is and has no gradient, so that it must always equal w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pushreduce.algorithms.averaged_gradients import average_gradients
from pushreduce.algorithms.base import Algorithm, Recorder
from pushreduce.algorithms.round_tally import RoundTally
from pushreduce.algorithms.wire import Wire
from pushreduce.communication.base import Communicator
from pushreduce.communication.mailbox import Message
from pushreduce.communication.topology import build_topology
from pushreduce.settings import SGPSettings

_SMALLEST_WEIGHT = 1e-9


class SGP(Algorithm):
    """Stochastic Gradient Push; memory beside the model: x, the messages under way, and the mailbox's slots.

    The mailbox has 2 slots (3 with overlap) for every in-neighbour of a round, whatever the number of ranks, and lies
    in the processor's memory, as do the messages. One worker alone is plain SGD and opens no mailbox.

    Args: those of `Algorithm`, and
        settings: overlap, graph and schedule; the default is synchronous SGP on the exponential graph.
        seed: of the random graph; the same on all ranks.

    Raises:
        ValueError: the graph does not fit, or the MPI's windows cannot be used; on all ranks alike.
        FloatingPointError: in `step` and `finish`, on one rank: weights that arrive, or leave, are not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        settings: SGPSettings | None = None,
        *,
        seed: int = 0,
        max_grad_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, optimizer, communicator, max_grad_norm=max_grad_norm, recorder=recorder)
        self.settings = settings = settings or SGPSettings()
        self._round = -1  # k, the last round that was begun
        self._num_steps = 0  # rounds with a gradient of this rank
        self._weight = 1.0  # w
        self._closed = False
        self._tally = RoundTally(communicator, self.progress)
        self._sending_interval = max(1, settings.tau)
        if communicator.size == 1:
            return
        self._topology = build_topology(
            settings.graph,
            communicator.size,
            num_peers=settings.num_peers,
            two_peer_rounds=settings.two_peer_rounds,
            seed=seed,
        )
        self._x = self.parameters.new_payload(1)
        self._begin_at_parameters()
        self._wire = Wire(settings.wire_dtype, self._x)
        self._mailbox = communicator.open_mailbox(
            self._topology,
            num_payload_bytes=len(self._x) * self._wire.num_bytes_per_element,
            # Sends being tau rounds apart, the messages of one earlier sending round at most are still under way.
            num_slot_rounds=min(settings.tau, 1) + 2,
        )

    @property
    def weight(self) -> float:
        """w; 1 in synchronous SGP on these graphs."""
        return self._weight

    def close(self) -> None:
        self._closed = True
        if self.communicator.size > 1:
            self._mailbox.free()

    def _refuse_unready(self) -> None:
        """Before anything has been told to others, or changed."""
        self._refuse_in_consensus()
        if self._closed:
            raise RuntimeError("the algorithm has been closed: make another one")

    # -- a round ---------------------------------------------------------------------------------------------------

    def step(self, num_samples: int) -> None:
        self._refuse_unready()
        if num_samples < 1:
            raise ValueError(
                f"a step needs the gradient of at least one sample, got {num_samples}: leave it out"
            )
        self._tally.rounds_begun = self._round + 2  # this one included
        self.progress.own_samples += num_samples
        self._take_round(num_samples)
        self._num_steps += 1
        self._tally.stop_wanted = self._stop_wanted
        self._tally.advance()

    def _take_round(self, num_samples: int) -> None:
        """Round k; with 0 samples one without a gradient, which only passes on what others wait for."""
        self._round += 1
        is_averaged = self._round < self.settings.average_rounds
        if self.communicator.size == 1:
            self._local_update()
            self._record_step("average" if is_averaged else "step", num_samples)
            return
        if is_averaged:
            self._average_round(num_samples)
        else:
            if num_samples > 0:
                self._local_step("step", num_samples)
            self._push()
            self._wait_for_messages()
        self._debias()

    def _local_step(self, event: str, num_samples: int) -> None:
        """x <- x + (z_after - z_before), as (x - z_before) + z_after: exact where w is 1. Never scaled by w."""
        with self._timed("communication_seconds"):
            self.parameters.add_to(self._x, alpha=-1.0)
        self._local_update()
        with self._timed("communication_seconds"):
            self.parameters.add_to(self._x)
        self._record_step(event, num_samples)

    def _average_round(self, num_samples: int) -> None:
        """SGD-AR's update, in the first rounds of a hybrid schedule; workers that are equal, with w = 1, stay so."""
        with self._timed("communication_seconds"):
            averaging = average_gradients(self, num_samples)
        self._wait(averaging.done)
        with self._timed("communication_seconds"):
            averaging.apply()
        self._local_step("average", num_samples)
        if num_samples == 0:
            for parameter in self.parameters.parameters:
                parameter.grad = None  # what others contributed is not to be added to by the next backward()

    def _push(self) -> None:
        """Sends p x and p w to the out-neighbours of the round; the rest stays."""
        sending_round, is_between = divmod(self._round - self.settings.average_rounds, self._sending_interval)
        if is_between:
            return
        receivers = self._topology.out_neighbours(self.communicator.rank, sending_round)
        # Nothing is applied meanwhile: it would be scaled by this round's share, as if it had come a round earlier.
        reserved = [to for to in receivers if self._reserve(sending_round, to)]
        share = 1.0 / (1 + len(receivers))
        if reserved:
            with self._waiting():
                memory = self._mailbox.outgoing()
            with self._timed("communication_seconds"):
                sent = self._wire.encode(self._x, share, memory)
                self._x.sub_(sent, alpha=len(reserved))  # of what was sent as rounded: the sum is conserved
                self._mailbox.send(sending_round, reserved, share * self._weight)
                self._weight -= len(reserved) * (share * self._weight)
            self.stats.messages += len(reserved)
            self.stats.bytes_sent += len(reserved) * len(memory)
        for to in receivers:
            if to not in reserved:
                self._mailbox.skip(sending_round, to)
                self.stats.messages_kept_back += 1
        self._record("send", round=self._round, sending_round=sending_round, to=reserved, share=share)

    def _reserve(self, sending_round: int, to: int) -> bool:
        """Whether the message may be sent. A rank whose receivers are always late would gather all mass: so only one
        that has no more than its share, w <= 1, may lose its patience."""
        patience = self.settings.slot_patience_seconds
        return self._wait(
            lambda: self._mailbox.is_granted(sending_round, to),
            receive=False,
            timeout_seconds=math.inf if patience is None or self._weight > 1.0 else patience,
        )

    def _wait_for_messages(self) -> None:
        """The blocking rule: all messages sent in rounds up to k - tau have been applied."""
        due = self._round - self.settings.average_rounds - self.settings.tau
        num_due = due // self._sending_interval + 1
        self._wait(lambda: self._mailbox.num_rounds_received >= num_due)

    def _debias(self) -> None:
        """z <- x / w"""
        if self._weight < _SMALLEST_WEIGHT:
            raise FloatingPointError(f"the weight of PushSum is {self._weight} in round {self._round}")
        with self._timed("communication_seconds"):
            self.parameters.copy_from(self._x, divisor=1.0 if self.settings.biased else self._weight)

    # -- receiving and waiting -------------------------------------------------------------------------------------

    def _apply(self, message: Message) -> None:
        """x <- x + what has arrived, straight from the mailbox's memory."""
        with self._timed("communication_seconds"):
            where = f"from rank {message.source} in round {self._round} of rank {self.communicator.rank}"
            self._x.add_(self._wire.decode(message.payload, message.weight, where))
            self._weight += message.weight
        self._record("apply", round=self._round, sending_round=message.round_number, source=message.source)
        sent_in = self.settings.average_rounds + message.round_number * self._sending_interval
        self.stats.staleness[self._round - sent_in] += 1

    @property
    def _own_sending_round(self) -> int:
        """The sending round of round k, or the last before it; -1 before the first."""
        if self._round < self.settings.average_rounds:
            return -1
        return (self._round - self.settings.average_rounds) // self._sending_interval

    def _wait(
        self, condition: Callable[[], bool], *, receive: bool = True, timeout_seconds: float = math.inf
    ) -> bool:
        """Waits until `condition()`, answering tallies and receiving meanwhile: others may wait for either.

        Returns whether it is true; False, only where nothing is received, once the time is over.
        """
        clock = self.communicator.clock
        deadline = clock.now() + timeout_seconds
        while True:
            self._tally.advance()

            def condition_or_tally() -> bool:
                return condition() or self._tally.has_news()

            with self._waiting():
                if receive and self.communicator.size > 1:
                    self._mailbox.wait(condition_or_tally, self._own_sending_round, self._apply)
                    in_time = True
                else:
                    in_time = self.communicator.wait_until(
                        condition_or_tally, max(0.0, deadline - clock.now())
                    )
            if condition():
                return True
            if not in_time:
                return False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts the time inside as blocked, less what was spent applying messages."""
        clock, stats = self.communicator.clock, self.stats
        start, busy = clock.now(), stats.communication_seconds
        yield
        stats.blocked_seconds += clock.now() - start - (stats.communication_seconds - busy)

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Rounds without a gradient up to the last that any rank has begun with one; then all messages are applied."""
        self._refuse_unready()
        tally = self._tally
        tally.finishing, tally.stop_wanted = True, self._stop_wanted
        while True:
            self._wait(lambda: self._round + 1 < tally.max_rounds_begun or tally.all_finishing)
            if self._round + 1 >= tally.max_rounds_begun:
                break
            self._take_round(0)
        if self.communicator.size > 1:
            self._drain()
        tally.end_finish()

    def _drain(self) -> None:
        num_sent = self._own_sending_round + 1
        self._wait(lambda: self._mailbox.num_rounds_received >= num_sent)
        self._debias()
        self._wire.check_canary(
            float(self._x[-1]), self._weight, f"after the drain on rank {self.communicator.rank}"
        )
        self._x[-1] = self._weight  # so that rounding errors do not add up
        weights = torch.tensor([self._weight], dtype=torch.float64)
        mean = self.communicator.average(weights, "sgp.weight").item()
        if abs(mean - 1.0) > 1e-9:
            raise RuntimeError(
                f"the weights of PushSum sum to {mean * self.communicator.size}, not {self.communicator.size}: "
                "a message was lost or applied twice"
            )

    @contextmanager
    def _parameters_averaged(self) -> Iterator[None]:
        """The sum of x over the sum of w, which is the number of ranks."""
        if self.communicator.size == 1:
            yield
            return
        own = self._x[: self.parameters.num_elements]
        self.parameters.copy_from(self.communicator.average(own, "consensus.weights"))
        try:
            yield
        finally:
            self._debias()

    def state_dict(self) -> dict[str, Any]:
        if self._tally.in_flight:
            raise RuntimeError("messages are in flight: call finish() first")
        return {
            "agreed_samples": self.progress.agreed_samples,
            "round": self._round,
            "num_steps": self._num_steps,
            "x": self._x.clone() if self.communicator.size > 1 else None,
            "weight": self._weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self._tally.in_flight
        if self.communicator.size > 1 and self._round >= 0:
            # The mailbox's rounds only go up.
            raise RuntimeError("the algorithm has taken rounds: make another one to load a state into")
        self.progress.agreed_samples = state["agreed_samples"]
        self._round, self._num_steps = state["round"], state["num_steps"]
        self._tally.rounds_begun = self._tally.max_rounds_begun = self._round + 1
        self._weight = state["weight"]
        if self.communicator.size > 1:
            self._x.copy_(state["x"])
            self._mailbox.begin_at(self._own_sending_round + 1)

    def begin_at(self, samples: int) -> None:
        super().begin_at(samples)
        if self.communicator.size > 1:
            self._begin_at_parameters()

    def _begin_at_parameters(self) -> None:
        self.parameters.copy_to(self._x)
        self._x[-1] = self._weight = 1.0

    def _record_step(self, event: str, num_samples: int) -> None:
        self._record(
            event,
            round=self._round,
            step=self._num_steps if num_samples > 0 else None,
            num_samples=num_samples,
            learning_rate=self._learning_rate,
        )
