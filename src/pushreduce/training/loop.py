"""The training loop: the same for every algorithm, on a real, an emulated and a simulated cluster.

Owns the order of a run: steps until a milestone, then what is due there (evaluation, checkpoint, end). Knows no
algorithm by name, no launcher and no signal; the entry point (`main.py`) hands it those.

Milestones are counts of global samples. A rank leaves its steps when *it* believes that one is reached and enters
`algorithm.finish()`, which returns when all ranks have. All act there on what they know alike: a request to stop, or
the milestone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from pushreduce.algorithms import build_algorithm
from pushreduce.communication.agreement import build_on_all
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.training import run_state
from pushreduce.training.checkpoint import Checkpoints
from pushreduce.training.emulated_compute import EmulatedCompute
from pushreduce.training.evaluate import EvaluationStoppedError, evaluate
from pushreduce.training.metrics import MetricsRecord
from pushreduce.training.milestones import Milestones
from pushreduce.training.run_directory import RunDirectory
from pushreduce.training.schedule import LearningRate, build_optimizer
from pushreduce.training.trace import Trace
from pushreduce.training.view import RunView
from pushreduce.workloads.base import Batch, Workload

logger = logging.getLogger(__name__)


class TrainingLoop:
    """One rank's run from its set-up to its end.

    Args:
        settings: resolved and checked.
        communicator: this rank's.
        workload: this rank's.
        model: to be trained, on `device`; see `model.py`.
        run_directory: where everything is written.
        device: where the model lives.
        stop_signal: what asks for a stop, or None.
        recorded_ranks: whose metrics are kept; default: those of all.

    Raises:
        ValueError: settings that do not fit the data or the checkpoint; on all ranks alike.
    """

    def __init__(
        self,
        settings: Settings,
        communicator: Communicator,
        workload: Workload,
        model: nn.Module,
        run_directory: RunDirectory,
        device: torch.device,
        stop_signal: Callable[[], int | None] = lambda: None,
        recorded_ranks: Sequence[int] | None = None,
    ) -> None:
        self.settings = settings
        self.communicator = communicator
        self.clock = communicator.clock
        self.workload = workload
        self.run_directory = run_directory
        self.device, self.dtype = device, next(model.parameters()).dtype
        self.view: RunView | None = None  # what rank 0 shows while the run goes on
        self.stop_signal = stop_signal
        self.recorded_ranks = range(communicator.size) if recorded_ranks is None else recorded_ranks

        self.model = model
        self.optimizer = build_optimizer(settings.optimizer, model)
        self.trace: Trace | None = None
        if settings.trace:  # a host may not be able to write
            make_trace = partial(Trace, run_directory, communicator.rank, communicator.size)
            self.trace = build_on_all(communicator, make_trace)
        self.emulated_compute = EmulatedCompute(  # before the algorithm, whose hooks must come second
            settings.emulation,
            model,
            communicator,
            seed=settings.seed,
            passes_per_step=settings.optimizer.accumulation_steps,
            communication_seconds=lambda: self.algorithm.stats.communication_seconds,
        )
        self.algorithm = build_algorithm(
            settings, model, self.optimizer, communicator, self.trace.record if self.trace else None
        )
        torch.manual_seed(settings.seed * 100_003 + communicator.rank + 1)  # dropout differs by rank
        self.batches = workload.train_batches()
        batch_size = workload.batch_size_per_rank * settings.optimizer.accumulation_steps
        self.global_batch_size = batch_size * communicator.size
        self.learning_rate = LearningRate(
            settings.optimizer,
            global_batch_size=self.global_batch_size,
            num_train_samples=workload.num_train_samples,
            epochs=settings.training.epochs,
        )
        self.checkpoints = Checkpoints(
            run_directory.checkpoints,
            communicator,
            keep=settings.training.keep_checkpoints,
            worker_of_rank=self.algorithm.worker_of_rank,
        )
        self.milestones = Milestones(settings.training, workload.num_train_samples)
        self.num_steps = 0
        self.wall_seconds = 0.0  # training only: evaluation and checkpoints are outside the clock
        self._clock_started = 0.0
        self._loading_seconds = 0.0  # of the step under way
        self.newest_checkpoint: Path | None = None
        self.resumed_from_samples = run_state.restore(self) if settings.resume else 0
        self.record = MetricsRecord(
            run_directory.metrics(communicator.rank) if communicator.rank in self.recorded_ranks else None,
            keep_until_step=self.num_steps if settings.resume else None,
        )
        if self.trace:
            self.trace.save_initial(self.algorithm.parameters.parameters)

    def run(self) -> bool:
        """Trains to the end, or until asked to stop. Returns whether the end was reached. Collective."""
        progress = self.algorithm.progress
        self.model.train()
        try:
            while not self.milestones.ended:
                with self._on_the_clock():
                    while progress.samples < self.milestones.next and not progress.stop_requested:
                        self._step()
                        if self.stop_signal() is not None:
                            self.algorithm.request_stop()
                own = self._own_parameters() if "evaluate" in self.milestones.next_actions else None
                with self._on_the_clock(), self._non_finite_aborts():
                    self.algorithm.finish()
                self._refuse_non_finite()
                if progress.stop_requested:
                    self.newest_checkpoint = run_state.save(self)
                    return False
                if progress.samples <= self.milestones.next - self.global_batch_size:
                    continue  # the estimate of a rank that is ahead of the others ran ahead, too
                self._act_on_milestone(own)
            run_state.save_final_model(self)
            return True
        except OSError as error:  # a full disk or an unreadable file, met by this rank alone
            self._abort(
                f"{error.filename or self.run_directory.path}: {error.strerror or error}; put that right, "
                f"then add --resume (newest checkpoint: {self.newest_checkpoint or 'none'})"
            )
        finally:
            self.record.close()
            if self.trace:
                self.trace.close(self.algorithm.parameters.parameters)

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        clock, stats = self.clock, self.algorithm.stats
        start = clock.now()
        before = (stats.local_update_seconds, stats.communication_seconds, stats.blocked_seconds)
        bytes_before = stats.bytes_sent
        samples_before = self.algorithm.progress.samples
        self._loading_seconds = 0.0
        learning_rate = self.learning_rate(samples_before)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, num_samples = self._forward_backward()
        computed = clock.now()
        in_backward = stats.communication_seconds - before[1]  # SGD-AR posts from inside backward()
        elsewhere = in_backward + self._loading_seconds  # loading is the loop's own, no part of compute
        with self._non_finite_aborts():
            self.algorithm.step(num_samples)
        self.num_steps += 1
        record = self.record.step(
            step=self.num_steps,
            samples=samples_before,
            epoch=samples_before / self.workload.num_train_samples,
            wall_seconds=self.wall_seconds + clock.now() - self._clock_started,
            loss=loss,
            learning_rate=learning_rate,
            num_samples=num_samples,
            compute_seconds=computed - start - elsewhere,
            local_update_seconds=stats.local_update_seconds - before[0],
            communication_seconds=stats.communication_seconds - before[1],
            blocked_seconds=stats.blocked_seconds - before[2],
            bytes_sent=stats.bytes_sent - bytes_before,
        )
        if self.view:
            self.view.step(record)

    def _forward_backward(self) -> tuple[float, int]:
        """Leaves the mean gradient in `.grad`; returns the mean loss and the number of samples on this rank."""
        num_passes = self.settings.optimizer.accumulation_steps
        self.optimizer.zero_grad()
        total_loss, num_samples = 0.0, 0
        for index in range(num_passes):
            batch = self._next_batch()
            is_last = index + 1 == num_passes
            with (
                self.emulated_compute.spending(self.num_steps),
                nullcontext() if is_last else self.algorithm.accumulating(),
            ):
                loss = self.workload.loss(self.model, batch) / num_passes
                loss.backward()
            total_loss += loss.item()
            num_samples += batch.num_samples
        if not math.isfinite(total_loss):
            self._abort_diverged(f"the loss is {total_loss} at step {self.num_steps + 1}")
        return total_loss, num_samples

    def _next_batch(self) -> Batch:
        start = self.clock.now()
        try:
            batch = next(self.batches).to(self.device, self.dtype)
        except ValueError as error:  # an unreadable file, met by this rank alone
            self._abort(str(error))
        self._loading_seconds += self.clock.now() - start
        return batch

    def _own_parameters(self) -> torch.Tensor:
        own = self.algorithm.parameters.new_payload()
        self.algorithm.parameters.copy_to(own)
        return own

    def _refuse_non_finite(self) -> None:
        """Where the last update before a milestone diverged, no loss has shown it, and it must not be saved."""
        if not self.algorithm.parameters.are_finite():
            self._abort_diverged(f"the parameters are not finite after step {self.num_steps}")

    @contextmanager
    def _non_finite_aborts(self) -> Iterator[None]:
        """An algorithm that receives, or would send, weights that are not finite says so."""
        try:
            yield
        except FloatingPointError as error:
            self._abort_diverged(str(error))

    def _abort_diverged(self, what: str) -> NoReturn:
        self._abort(
            f"{what}: lower --base-lr, add --warmup-epochs or --max-grad-norm "
            f"(newest checkpoint: {self.newest_checkpoint or 'none'})"
        )

    def _abort(self, message: str) -> NoReturn:
        """Ends all ranks for a reason that this one alone knows; what is on disk stays as it is."""
        with suppress(OSError):  # where the disk is full, the reason to tell is already known
            self.record.close()
        self.communicator.abort(f"error: rank {self.communicator.rank}: {message}", exit_code=2)

    @contextmanager
    def _on_the_clock(self) -> Iterator[None]:
        self._clock_started = self.clock.now()
        yield
        self.wall_seconds += self.clock.now() - self._clock_started

    # -- milestones ------------------------------------------------------------------------------------------------

    def _act_on_milestone(self, own: torch.Tensor | None) -> None:
        due = self.milestones.next_actions
        if own is not None:
            try:
                self._evaluate(own)
            except (
                EvaluationStoppedError
            ):  # it may outlast the grace: the checkpoint first, the evaluation after a resume
                self.algorithm.request_stop()
                return
        self.milestones.pass_next()
        if "checkpoint" in due:
            self.newest_checkpoint = run_state.save(self)

    def _evaluate(self, own: torch.Tensor) -> None:
        result = evaluate(
            self.algorithm,
            self.workload,
            own,
            batch_norm=self.settings.training.batch_norm,
            stop_wanted=lambda: self.stop_signal() is not None,
        )
        samples = self.algorithm.progress.samples
        record = self.record.evaluation(
            step=self.num_steps,
            samples=samples,
            epoch=samples / self.workload.num_train_samples,
            wall_seconds=self.wall_seconds,
            validation_loss=result.validation_loss,
            top1_percent=result.top1_percent,
            top1_percent_by_rank=result.top1_percent_by_rank,
            consensus_distance=result.consensus_distance,
            steps_per_allreduce=dict(self.algorithm.stats.steps_per_allreduce),
            staleness=dict(self.algorithm.stats.staleness),
            messages_kept_back=self.algorithm.stats.messages_kept_back,
        )
        if self.view:
            self.view.evaluation(record, result.predictions)
        self.model.train()
