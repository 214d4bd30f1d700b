"""The training loop on the simulated cluster: where it ends, what it evaluates, and how it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pushreduce.communication.simulated import Aborted, SimulatedCluster
from pushreduce.settings import DataSettings, LASGDSettings, OptimizerSettings, Settings, TrainingSettings
from pushreduce.training.evaluate import score
from pushreduce.training.loop import TrainingLoop
from pushreduce.training.metrics import read_records
from pushreduce.training.model import initial_model
from pushreduce.training.run_directory import RunDirectory
from pushreduce.workloads import build_workload

SETTINGS = Settings(
    data=DataSettings(dataset="synthetic", image_size=8, num_synthetic_samples=400, batch_size_per_rank=8),
    optimizer=OptimizerSettings(base_lr=0.2),
    training=TrainingSettings(epochs=2.0, checkpoint_every_epochs=1.0),
)


def train(
    cluster, settings, seconds_of_rank=lambda rank: 0.0, stop_after=None, stop_signal=lambda loop, rank: None
):
    """Trains on every rank; (reached the end, the loop) of each."""

    def body(communicator):
        workload = build_workload(settings.data, seed=0, rank=communicator.rank, size=communicator.size)
        cpu = torch.device("cpu")
        model = initial_model(settings, workload, cpu)
        run_directory = RunDirectory.create(settings, communicator)

        def after_step():
            communicator.clock.sleep(seconds_of_rank(communicator.rank))  # as if the step had taken so long
            return 15 if loop.num_steps == stop_after else stop_signal(loop, communicator.rank)

        loop = TrainingLoop(settings, communicator, workload, model, run_directory, cpu, after_step)
        return loop.run(), loop

    return cluster.run(body)


def with_run_dir(tmp_path: Path, **changes) -> Settings:
    return replace(SETTINGS, run_dir=str(tmp_path / "run"), **changes)


@pytest.mark.parametrize("tau_max", [0, 1, 8])
@pytest.mark.parametrize("slow", [1.0, 20.0])
def test_ends_within_a_global_batch_of_its_epochs(tmp_path, tau_max, slow):
    """Also with a slow network and one slow rank, where the others' estimates of the samples run far ahead."""
    cluster = SimulatedCluster(4, average_seconds=lambda *_: 0.5)
    settings = with_run_dir(tmp_path, lasgd=LASGDSettings(tau_max=tau_max))
    results = train(cluster, settings, lambda rank: 0.01 * (slow if rank == 3 else 1.0))
    samples = {loop.algorithm.progress.samples for _, loop in results}
    assert len(samples) == 1
    assert all(ended for ended, _ in results)
    assert samples.pop() > 800 - 32


def last_evaluation_and_score_alone(settings: Settings) -> tuple[dict, dict]:
    """The run's last evaluation, and the sums of its `model.pt` over the whole validation set, on one rank."""
    run = Path(settings.run_dir)
    evaluations = [r for r in read_records(run / "metrics.rank0.jsonl") if r["kind"] == "evaluation"]
    alone = build_workload(settings.data, seed=0, rank=0, size=1)
    model = alone.build_model()
    model.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    sums, _ = score(model, alone)
    assert sums["num_samples"] == alone.num_validation_samples
    return evaluations[-1], sums


@pytest.mark.parametrize("algorithm", ["allreduce", "lasgd"])
def test_evaluates_the_final_model_on_every_validation_image_once(tmp_path, algorithm):
    settings = with_run_dir(tmp_path, algorithm=algorithm)
    train(SimulatedCluster(3), settings)
    last, sums = last_evaluation_and_score_alone(settings)
    assert sums["num_samples"] == 100
    assert last["top1_percent"] == pytest.approx(100 * sums["num_correct"] / sums["num_samples"])
    assert last["validation_loss"] == pytest.approx(sums["loss_sum"] / sums["num_samples"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["allreduce", "lasgd"])
def test_a_stopped_run_goes_on_where_it_was(tmp_path, algorithm):
    """On one simulated rank bit for bit; more ranks and real ones are in tests/end_to_end."""
    undisturbed = with_run_dir(tmp_path / "a", algorithm=algorithm)
    ((ended, whole),) = train(SimulatedCluster(1), undisturbed)
    assert ended
    stopped = with_run_dir(tmp_path / "b", algorithm=algorithm)
    ((ended, _),) = train(SimulatedCluster(1), stopped, stop_after=37)
    assert not ended
    ((ended, resumed),) = train(SimulatedCluster(1), replace(stopped, resume=True))
    assert ended
    for (name, expected), actual in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(actual, expected), name
    losses = [
        [
            r["loss"]
            for r in read_records(tmp_path / side / "run" / "metrics.rank0.jsonl")
            if r["kind"] == "step"
        ]
        for side in "ab"
    ]
    assert losses[0] == losses[1]


def test_batch_norm_reestimated_scores_like_the_saved_model(tmp_path):
    data = replace(SETTINGS.data, model="resnet18-cifar", num_synthetic_samples=64)
    training = TrainingSettings(epochs=1.0, checkpoint_every_epochs=1.0, batch_norm="reestimate")
    settings = with_run_dir(tmp_path, data=data, training=training)
    train(SimulatedCluster(2), settings)
    last, sums = last_evaluation_and_score_alone(settings)
    assert last["validation_loss"] == pytest.approx(sums["loss_sum"] / sums["num_samples"], rel=1e-4)


def test_a_resumed_run_takes_the_settings_given_now(tmp_path):
    """The learning rate, momentum and decay of the resumed run, not those that the checkpoint was written with."""
    settings = with_run_dir(tmp_path)
    train(SimulatedCluster(2), settings, stop_after=10)
    changed = replace(
        settings,
        resume=True,
        optimizer=replace(settings.optimizer, momentum=0.5, weight_decay=0.25),
        lasgd=LASGDSettings(elastic_beta=0.5),
    )
    for ended, loop in train(SimulatedCluster(2), changed):
        assert ended
        assert loop.optimizer.param_groups[0]["momentum"] == 0.5
        assert loop.optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize(
    "changes", [{"algorithm": "allreduce"}, {"optimizer": OptimizerSettings(optimizer="adam", base_lr=0.01)}]
)
def test_another_algorithm_or_optimizer_is_refused(tmp_path, changes):
    settings = with_run_dir(tmp_path)
    train(SimulatedCluster(2), settings, stop_after=10)
    with pytest.raises(ValueError, match="go on with that"):
        train(SimulatedCluster(2), replace(settings, resume=True, **changes))


@pytest.mark.parametrize("algorithm", ["lasgd", "sgp"])
def test_hosts_as_workers_go_on_where_they_were(tmp_path, algorithm):
    """Three ranks on two hosts, prolonged after an epoch, where the undisturbed run drained for its checkpoint, too."""
    cluster = SimulatedCluster(3, ranks_per_host=2)
    # All batches full, so that learning rates and milestones do not depend on what has been agreed upon when.
    data = replace(SETTINGS.data, num_synthetic_samples=3 * 128)
    optimizer = OptimizerSettings(base_lr=0.2, schedule="constant")
    changes = {"algorithm": algorithm, "worker": "host", "data": data, "optimizer": optimizer}
    whole = train(cluster, with_run_dir(tmp_path / "a", **changes), lambda rank: 0.01)
    settings = with_run_dir(tmp_path / "b", **changes)
    once = replace(settings.training, epochs=1.0)
    train(cluster, replace(settings, training=once), lambda rank: 0.01)
    resumed = train(cluster, replace(settings, resume=True), lambda rank: 0.01)
    for (_, expected), (ended, loop) in zip(whole, resumed, strict=True):
        assert ended
        assert loop.num_steps == expected.num_steps
        assert loop.algorithm.progress.size == 2
        assert loop.algorithm.worker_of_rank == [0, 0, 1]
        ours, theirs = loop.model.state_dict(), expected.model.state_dict()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])
    last, sums = last_evaluation_and_score_alone(settings)
    assert last["top1_percent"] == pytest.approx(100 * sums["num_correct"] / sums["num_samples"])


def test_processes_go_on_from_the_consensus_of_hosts(tmp_path, caplog):
    settings = with_run_dir(tmp_path, worker="host")
    train(SimulatedCluster(4, ranks_per_host=2), settings, lambda rank: 0.01, stop_after=10)
    changed = replace(settings, resume=True, worker="process")
    for ended, loop in train(SimulatedCluster(4, ranks_per_host=2), changed, lambda rank: 0.01):
        assert ended
        assert loop.algorithm.progress.size == 4
    assert "is of 2 workers of 4 ranks: all 4 ranks begin at its consensus model" in caplog.text


def test_another_number_of_ranks_goes_on_from_the_consensus(tmp_path):
    settings = with_run_dir(tmp_path)
    train(SimulatedCluster(2), settings, lambda rank: 0.01 * (rank + 1), stop_after=10)
    results = train(SimulatedCluster(3), replace(settings, resume=True), lambda _: 0.01)
    assert all(ended for ended, _ in results)
    for rank in range(3):
        records = list(read_records(Path(settings.run_dir) / f"metrics.rank{rank}.jsonl"))
        steps = [record["step"] for record in records if record["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        if rank == 0:
            seconds = [record["wall_seconds"] for record in records]
            assert seconds == sorted(seconds)


def test_parameters_that_diverged_in_the_last_step_are_not_saved(tmp_path):
    settings = with_run_dir(tmp_path)

    def body(communicator):
        cpu = torch.device("cpu")
        workload = build_workload(settings.data, seed=0, rank=communicator.rank, size=communicator.size)
        model = initial_model(settings, workload, cpu)
        run_directory = RunDirectory.create(settings, communicator)

        def after_step():
            if (
                loop.num_steps == 25
            ):  # the last step of the first epoch: no loss will be computed before it is saved
                next(iter(model.parameters())).data.fill_(float("nan"))

        loop = TrainingLoop(settings, communicator, workload, model, run_directory, cpu, after_step)
        loop.run()

    with pytest.raises(Aborted, match="not finite after step 25"):
        SimulatedCluster(2).run(body)
    assert not list((Path(settings.run_dir) / "checkpoints").glob("0*"))


def evaluations(settings: Settings) -> list[dict]:
    records = read_records(Path(settings.run_dir) / "metrics.rank0.jsonl")
    return [record for record in records if record["kind"] == "evaluation"]


@pytest.mark.parametrize("algorithm", ["allreduce", "lasgd"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_during_an_evaluation_saves_first_and_evaluates_after_the_resume(tmp_path, algorithm, size):
    """An evaluation may outlast the grace that a batch system gives; nothing is lost, repeated or left out."""
    undisturbed, stopped = (with_run_dir(tmp_path / side, algorithm=algorithm) for side in "ab")
    train(SimulatedCluster(size), undisturbed)

    def stop_while_evaluating(loop, rank):
        return 15 if not loop.model.training and rank == size - 1 else None

    results = train(SimulatedCluster(size), stopped, stop_signal=stop_while_evaluating)
    assert not any(ended for ended, _ in results)
    assert evaluations(stopped) == []
    steps = results[0][1].num_steps
    assert [path.name for path in (tmp_path / "b/run/checkpoints").iterdir()] == [f"0001-step-{steps}"]
    results = train(SimulatedCluster(size), replace(stopped, resume=True))
    assert all(ended for ended, _ in results)
    ours, expected = evaluations(stopped), evaluations(undisturbed)
    assert len(ours) == 2
    for key in ("samples", "step", "validation_loss", "top1_percent"):
        assert [record[key] for record in ours] == pytest.approx(
            [record[key] for record in expected], rel=1e-4
        )
