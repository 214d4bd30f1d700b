"""A host as one worker: its ranks average their gradients before every local step of an algorithm among hosts.

The paper's LASGD and SGP, where a worker is a machine with several accelerators (`--worker host`; its WLASGD has a
worker for each of them). The algorithm itself, `lasgd.py` or `sgp.py` as it is, runs on the first rank of every host,
the leader, and on a communicator of the leaders only. A step of host h, with the ranks i of h:

    g_h <- sum_i b_i g_i / sum_i b_i         past Horovod's queue: in memory that the ranks share, or by NCCL on GPUs
    the leader's algorithm takes its step with g_h and sum_i b_i samples
    x_i <- x_h, on every rank                likewise (`host_exchange.py`)

So all ranks of a host apply a synchronisation at the same local step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pushreduce.algorithms.allreduce import AllReduceSGD
from pushreduce.algorithms.averaged_gradients import GradientPayload
from pushreduce.algorithms.base import Algorithm, Progress, Recorder
from pushreduce.algorithms.host_exchange import HostExchange, exchange_for
from pushreduce.algorithms.tally import Tally
from pushreduce.communication.agreement import agree
from pushreduce.communication.base import Communicator, HostSplit


class HostWorker(Algorithm):
    """One rank of a host that is a worker of LASGD or SGP.

    Every rank of the host has the same `progress` and parameters after a step; counters of communication between hosts
    are the leader's. A rank that is in `finish()` while others of its host take steps contributes nothing and takes
    their updates. Memory beside the leader's algorithm: a set of gradients a rank.

    Args:
        model, optimizer, communicator: this rank's, as for `Algorithm`; the optimizer is used on leaders only.
        build: makes the algorithm of the hosts on the leaders' communicator, around the same model and optimizer.
        recorder: of a trace; that of the algorithm is given to it by `build`.

    Raises:
        ValueError: on all ranks alike, where start-up was not told of host workers, nothing can be exchanged inside a
            host, or the algorithm cannot be built.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        build: Callable[[Communicator], Algorithm],
        *,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, optimizer, communicator, recorder=recorder)
        split = communicator.split_by_host()
        self._host, self.worker_of_rank = split.host, split.host_of_rank
        self._inner: Algorithm | None = None  # the leader's
        self._closed = self._in_flight = False
        self._exchange: HostExchange | None = None  # of a host with several ranks
        agree(communicator, self._make_exchange)  # where one rank may fail alone
        agree(communicator, self._connect)
        agree(communicator, lambda: self._build_inner(build, split))
        own = self.worker_of_rank[communicator.rank]
        ranks = [rank for rank, worker in enumerate(self.worker_of_rank) if worker == own]
        self._record("worker", ranks=ranks)

    def _make_exchange(self) -> None:
        """For payloads of gradients and tallies, and the leader's parameters."""
        if self._host.size > 1:
            self._gradients = GradientPayload(self)
            num_elements = self._gradients.num_elements + Tally.LENGTH
            self._exchange = exchange_for(self.parameters)(self._host, self.parameters, num_elements)

    def _connect(self) -> None:
        if self._exchange is not None:
            self._exchange.connect()
            self._leaders_progress = self._host.shared(3, torch.int64)

    def _build_inner(self, build: Callable[[Communicator], Algorithm], split: HostSplit) -> None:
        share = self._host.size / self.communicator.size  # hosts may have different numbers of ranks
        if split.leaders is None:
            self.progress = Progress(size=max(self.worker_of_rank) + 1, share=share)
            return
        self._inner = inner = build(split.leaders)
        inner.progress.share = share
        if isinstance(inner, AllReduceSGD):
            raise ValueError(
                "SGD-AR averages all ranks' gradients: hosts as workers change nothing, use it as it is"
            )
        if self._exchange is not None:
            self._exchange.adopt(inner.parameters)
            # The first would keep what the parameters were in before.
            self._gradients = GradientPayload(inner)
        self.parameters, self.progress, self.stats = inner.parameters, inner.progress, inner.stats

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, num_samples: int) -> None:
        self._refuse_unready()
        if num_samples < 1:
            raise ValueError(
                f"a step needs the gradient of at least one sample, got {num_samples}: leave it out"
            )
        self._in_flight = True
        self._take_round(num_samples)

    def finish(self) -> None:
        self._refuse_unready()
        while not self._take_round(0, finishing=True):
            pass  # others of this host still take steps
        self._in_flight = False

    def _refuse_unready(self) -> None:
        self._refuse_in_consensus()
        if self._closed:
            raise RuntimeError("the algorithm has been closed: make another one")

    def _take_round(self, num_samples: int, *, finishing: bool = False) -> bool:
        """One step of the host, or, where all its ranks are finishing, the end. Returns whether they are."""
        told = Tally(num_samples, int(finishing), int(self._stop_wanted))
        if self._host.size > 1:  # one rank's gradient is the mean as it is, bit for bit
            told = self._add_up(told)
        all_finishing = told.finishing == self._host.size
        if self._inner is not None:
            self._lead(self._inner, told, num_samples, all_finishing=all_finishing)
        self._follow()
        return all_finishing

    def _add_up(self, own: Tally) -> Tally:
        """Leaves the payloads' sum in the exchange; returns that of the tallies."""
        exchange = self._exchange
        assert exchange is not None
        with self._timed("communication_seconds"):
            self._gradients.write(own.samples, exchange.row[: -Tally.LENGTH])
            own.write_to(exchange.row[-Tally.LENGTH :])
        with self._timed("blocked_seconds"):
            exchange.sum()
            return Tally.sum_from(exchange.total[-Tally.LENGTH :], 1)

    def _lead(self, inner: Algorithm, told: Tally, own_samples: int, *, all_finishing: bool) -> None:
        if told.stop_wanted:
            inner.request_stop()
        if all_finishing:
            inner.finish()
            return
        if self._exchange is not None:
            with self._timed("communication_seconds"):
                self._gradients.read(own_samples, self._exchange.total[: -Tally.LENGTH])
        inner.step(told.samples)
        if own_samples == 0:
            for parameter in self.parameters.parameters:
                parameter.grad = None  # what others contributed is not to be added to by the next backward()

    def _follow(self) -> None:
        """The leader's parameters and progress on all ranks of its host."""
        if self._exchange is None:
            return
        progress = self.progress
        if self._inner is not None:
            own = (progress.agreed_samples, progress.own_samples, int(progress.stop_requested))
            self._leaders_progress.copy_(torch.tensor(own))
        with self._timed("blocked_seconds"):
            self._host.barrier()
        if self._inner is None:
            agreed, own_samples, stop_requested = self._leaders_progress.tolist()
            progress.agreed_samples, progress.own_samples = agreed, own_samples
            progress.stop_requested = bool(stop_requested)
        with self._timed("communication_seconds"):
            self._exchange.hand_on(self.parameters.buffers)
        with self._timed("blocked_seconds"):
            num_bytes = sum(buffer.nbytes for buffer in self.parameters.buffers)
            self._host.barrier(num_bytes)  # from here on the leader's are its own again

    # -- consensus and state ---------------------------------------------------------------------------------------

    @contextmanager
    def _parameters_averaged(self) -> Iterator[None]:
        if self._inner is not None:
            with self._inner._parameters_averaged():
                self._follow()
                yield
            return
        own = [buffer.clone() for buffer in self.parameters.buffers]
        self._follow()
        try:
            yield
        finally:
            for buffer, kept in zip(self.parameters.buffers, own, strict=True):
                buffer.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        if self._in_flight:
            raise RuntimeError("a step of another host may be in flight: call finish() first")
        if self._inner is None:
            return {"agreed_samples": self.progress.agreed_samples}
        return self._inner.state_dict()  # where a host has one rank, that of a worker a process

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._inner is None:
            self.progress.agreed_samples = state["agreed_samples"]
        else:
            self._inner.load_state_dict(state)

    def begin_at(self, samples: int) -> None:
        super().begin_at(samples)
        if self._inner is not None:
            self._inner.begin_at(samples)

    def close(self) -> None:
        self._closed = True
        if self._inner is not None:
            self._inner.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
