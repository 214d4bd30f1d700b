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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from pushreduce.algorithms import build_algorithm
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.training.agreement import agree_with_root
from pushreduce.training.checkpoint import CheckpointError, Checkpoints, fingerprint
from pushreduce.training.evaluate import DTYPES, OwnModel, evaluate, reestimate_batch_norm
from pushreduce.training.metrics import MetricsRecord
from pushreduce.training.milestones import Milestones
from pushreduce.training.run_directory import RunDirectory, atomic_file
from pushreduce.training.schedule import LearningRate, build_optimizer
from pushreduce.training.trace import Trace
from pushreduce.training.view import RunView
from pushreduce.workloads.base import Batch, Workload

logger = logging.getLogger(__name__)


def initial_model(settings: Settings, workload: Workload) -> nn.Module:
    """The model that a run begins with, on the CPU: the same for a seed, whatever the number of ranks.

    Raises:
        ValueError: the model does not fit the data.
    """
    torch.manual_seed(settings.seed)
    return workload.build_model()


class TrainingLoop:
    """One rank's run from its set-up to its end.

    Args:
        settings: resolved and checked.
        communicator: this rank's.
        workload: this rank's.
        model: to be trained, by `initial_model`.
        run_directory: where everything is written.
        device: where the model lives.
        stop_signal: what asks for a stop, or None.

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
    ) -> None:
        self.settings = settings
        self.communicator = communicator
        self.clock = communicator.clock
        self.workload = workload
        self.run_directory = run_directory
        self.device, self.dtype = device, DTYPES[settings.training.dtype]
        self.view: RunView | None = None  # what rank 0 shows while the run goes on
        self.stop_signal = stop_signal

        torch.manual_seed(
            settings.seed
        )  # the same first model with any number of ranks; rank 0's is broadcast
        model = workload.build_model().to(device, self.dtype)
        self.optimizer = build_optimizer(settings.optimizer, model)
        self.trace = Trace(run_directory, communicator.rank, communicator.size) if settings.trace else None
        self.algorithm = build_algorithm(
            settings, model, self.optimizer, communicator, self.trace.record if self.trace else None
        )
        self.model = model
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
            run_directory.checkpoints, communicator, keep=settings.training.keep_checkpoints
        )
        self.milestones = Milestones(settings.training, workload.num_train_samples)
        self.num_steps = 0
        self.wall_seconds = 0.0  # training only: evaluation and checkpoints are outside the clock
        self._clock_started = 0.0
        self.newest_checkpoint: Path | None = None
        self.resumed_from_samples = self._restore() if settings.resume else 0
        self.record = MetricsRecord(
            run_directory.metrics(communicator.rank),
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
                own = self._own_model() if "evaluate" in self.milestones.next_actions else None
                with self._on_the_clock():
                    self.algorithm.finish()
                if progress.stop_requested:
                    self._save_checkpoint()
                    return False
                if progress.samples <= self.milestones.next - self.global_batch_size:
                    continue  # the estimate of a rank that is ahead of the others ran ahead, too
                self._act_on_milestone(own)
            self._save_final_model()
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
        learning_rate = self.learning_rate(samples_before)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, num_samples = self._forward_backward()
        computed = clock.now()
        in_backward = stats.communication_seconds - before[1]  # SGD-AR posts from inside backward()
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
            compute_seconds=computed - start - in_backward,
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
            with self.algorithm.accumulating() if index + 1 < num_passes else nullcontext():
                loss = self.workload.loss(self.model, batch) / num_passes
                loss.backward()
            total_loss += loss.item()
            num_samples += batch.num_samples
        if not math.isfinite(total_loss):
            self._abort(
                f"the loss is {total_loss} at step {self.num_steps + 1}: lower --base-lr, add --warmup-epochs or "
                f"--max-grad-norm (newest checkpoint: {self.newest_checkpoint or 'none'})"
            )
        return total_loss, num_samples

    def _next_batch(self) -> Batch:
        try:
            return next(self.batches).to(self.device, self.dtype)
        except ValueError as error:  # an unreadable file, met by this rank alone
            self._abort(str(error))

    def _own_model(self) -> OwnModel:
        try:
            return OwnModel(self.algorithm, self.workload)
        except ValueError as error:  # likewise, among the validation files
            self._abort(str(error))

    def _abort(self, message: str) -> NoReturn:
        """Ends all ranks for a reason that this one alone knows; what is on disk stays as it is."""
        with suppress(OSError):  # where the disk is full, the reason to tell is already known
            self.record.close()
        self.communicator.abort(f"error: rank {self.communicator.rank}: {message}", exit_code=2)
        raise AssertionError("abort() does not return")

    @contextmanager
    def _on_the_clock(self) -> Iterator[None]:
        self._clock_started = self.clock.now()
        yield
        self.wall_seconds += self.clock.now() - self._clock_started

    # -- milestones ------------------------------------------------------------------------------------------------

    def _act_on_milestone(self, own: OwnModel | None) -> None:
        due = self.milestones.next_actions
        self.milestones.pass_next()
        if own is not None:
            self._evaluate(own)
        if "checkpoint" in due:
            self._save_checkpoint()

    def _evaluate(self, own: OwnModel) -> None:
        result = evaluate(self.algorithm, self.workload, own, batch_norm=self.settings.training.batch_norm)
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
        )
        if self.view:
            self.view.evaluation(record, self.model, self.workload)
        self.model.train()

    # -- state -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        samples = self.algorithm.progress.samples
        self.record.flush()  # a run resumed here finds all its lines
        with self.algorithm.consensus():
            consensus = self._weights() if self.communicator.rank == 0 else None
        self.newest_checkpoint = self.checkpoints.save(
            self.num_steps,
            own_state={
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "algorithm": self.algorithm.state_dict(),
                "batches": self.batches.state_dict(),
                "torch_rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "num_steps": self.num_steps,
                "wall_seconds": self.wall_seconds,
            },
            consensus_state=consensus,
            facts={
                "samples": samples,
                "algorithm": self.settings.algorithm,
                "milestones": self.milestones.state_dict(),
            },
        )

    def _restore(self) -> int:
        """Loads the newest intact checkpoint, if there is one. Returns its global samples. Collective."""
        loaded = self.checkpoints.load_newest(fingerprint(self.model.state_dict()))
        if loaded is None:
            return 0
        if loaded.facts["algorithm"] != self.settings.algorithm:
            raise ValueError(
                f"{loaded.path} is of --algorithm {loaded.facts['algorithm']}, not {self.settings.algorithm}: "
                "go on with that, or start a new run with another --run-dir"
            )
        self.newest_checkpoint = loaded.path
        samples = int(loaded.facts["samples"])
        self.milestones.load_state_dict(loaded.facts["milestones"])
        if (
            loaded.own_state is None
        ):  # another number of ranks: all begin at the consensus, with fresh optimizers
            assert loaded.consensus_state is not None
            logger.warning(
                "%s is of %d ranks: all %d begin at its consensus model, with new optimizer state",
                loaded.path,
                loaded.facts["num_ranks"],
                self.communicator.size,
            )
            self.model.load_state_dict(loaded.consensus_state)
            self.algorithm.begin_at(samples)
            self.num_steps = int(loaded.facts["step"])
            return samples
        state = loaded.own_state
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.num_steps, self.wall_seconds = state["num_steps"], state["wall_seconds"]
        return samples

    def _save_final_model(self) -> None:
        with self.algorithm.consensus():
            if self.settings.training.batch_norm == "reestimate":
                reestimate_batch_norm(self.model, self.workload, self.communicator)
            agree_with_root(self.communicator, self._write_model)

    def _write_model(self) -> None:
        path = self.run_directory.model_pt
        try:
            with atomic_file(path) as file:
                torch.save(self._weights(), file)
        except OSError as error:
            raise CheckpointError(
                f"cannot save {path} ({error.strerror}): make room, then add --resume"
            ) from error

    def _weights(self) -> dict[str, torch.Tensor]:
        """A plain state_dict on the CPU, each tensor with its own memory (the model's own are views of one buffer)."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
