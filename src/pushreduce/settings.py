"""The settings of a run, as nested dataclasses: the one place that names them, with their defaults and units.

Owns names, types, defaults and the checks that need nothing but the settings themselves. Does not read files
(`settings_file.py`) or the command line (`command_line.py`), and imports neither torch nor MPI, so that
`--help` answers at once.

Every field is a command-line option of the same name without its section (`--tau-max 5`) and a key of its
section in the YAML file (`lasgd: {tau_max: 5}`). So names are unique over all sections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

AlgorithmName = Literal["allreduce", "lasgd", "sgp"]


@dataclass(frozen=True)
class LASGDSettings:
    """Locally Asynchronous SGD (used by `--algorithm lasgd` only)."""

    tau_max: int = 1
    """Local steps after which a worker waits for the all-reduce under way; 0: never wait (unbounded)."""
    elastic_alpha: float = 1.0
    """Share of the distance to the centre z that a worker moves at a synchronisation (equation 6)."""
    elastic_beta: float = 1.0
    """Share of the new mean in the centre z (equation 4); below 1 the centre remembers."""


@dataclass(frozen=True)
class SGPSettings:
    """Stochastic Gradient Push (used by `--algorithm sgp` only)."""

    tau: int = 0
    """Rounds that a message may be late; 0: synchronous SGP, 1 or more: OSGP, sending every tau rounds."""
    graph: Literal["exponential", "bipartite-exponential", "ring", "complete", "random"] = "exponential"
    """Who sends to whom; all but ring and complete change from round to round."""
    num_peers: int = 1
    """Receivers of a rank in a round of the exponential graph, 1 or 2."""
    two_peer_rounds: int = 0
    """The first so many sending rounds of the exponential graph have 2 peers, the others 1."""
    average_rounds: int = 0
    """In the first so many rounds gradients are averaged over all ranks, as in allreduce, and nothing is sent."""
    biased: bool = False
    """Take the gradient at x instead of x / w, an ablation: with overlap that is the wrong point."""
    wire_dtype: Literal["full", "bfloat16", "float16"] = "full"
    """Precision of messages; what rounding takes from a message the sender keeps, so that no mass is lost."""
    slot_patience_seconds: float | None = None
    """How long to wait for a slow receiver before the mass is kept (0: not at all), unless w > 1; default: for ever."""


@dataclass(frozen=True)
class DataSettings:
    """What is trained on what, and how the data is divided over the ranks."""

    dataset: Literal["digits", "fashion-mnist", "cifar10", "imagefolder", "synthetic"] = "digits"
    """digits comes with scikit-learn; imagefolder is the ImageNet layout (train/CLASS/*, val/CLASS/*)."""
    data_dir: str | None = None
    """Where the data set's files are; default: data/DATASET below the working directory."""
    download: bool = False
    """Fetch fashion-mnist or cifar10 from the internet if it is not in data_dir."""
    model: str = "cnn"
    """mlp (51 thousand parameters), cnn (260 thousand), resnet18-cifar, or the name of any torchvision classifier."""
    batch_size_per_rank: int | None = None
    """Samples of one backward pass on one rank; default: the smaller of 32 and the smallest shard."""
    shards: Literal["iid", "dirichlet"] = "iid"
    """How samples are dealt to ranks: at random, or with class shares from Dirichlet(dirichlet_alpha)."""
    dirichlet_alpha: float = 0.1
    """Concentration of the class shares with --shards dirichlet; small is more skewed."""
    shard_proportions: tuple[float, ...] | None = None
    """Relative shard sizes, one number a rank (1 1 2 4); default: equal."""
    num_loader_workers: int = 0
    """Processes a rank that read and augment images (imagefolder only)."""
    skip_corrupt: bool = False
    """Skip unreadable image files and count them, instead of stopping at the first (imagefolder only)."""
    image_size: int = 224
    """Side in pixels of the training crop (imagefolder) or of the image (synthetic)."""
    num_synthetic_samples: int = 8192
    """Training images of the synthetic data set; a quarter as many for validation."""
    num_synthetic_classes: int = 10
    """Classes of the synthetic data set."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The local optimizer and its learning-rate schedule, on global samples."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The rule of a worker's local update."""
    base_lr: float = 0.1
    """Learning rate for a global batch of reference_batch_size; scaled linearly to the run's global batch."""
    reference_batch_size: int = 256
    """The global batch for which base_lr holds."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = True
    """Nesterov's form of the momentum of sgd."""
    weight_decay: float = 1e-4
    """Added to the gradient as weight_decay x parameter (sgd, adam), or decoupled from it (adamw)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this L2 norm before the optimizer's step; default: no clipping."""
    accumulation_steps: int = 1
    """Backward passes a step; their gradients are averaged."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """The learning rate after the warm-up."""
    warmup_epochs: float = 0.0
    """Linear warm-up from the unscaled base_lr (from 0 where scaling does not raise it)."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which --schedule step multiplies the rate by decay_factor."""
    decay_factor: float = 0.1
    """What --schedule step multiplies the rate by."""


@dataclass(frozen=True)
class TrainingSettings:
    """Length of the run, and what happens once in a while."""

    epochs: float = 20.0
    """Passes over the whole training set, counted in global samples."""
    evaluate_every_epochs: float = 1.0
    """Epochs between evaluations of the consensus model."""
    checkpoint_every_epochs: float = 5.0
    """Epochs between checkpoints; there is always one at the end."""
    keep_checkpoints: int = 3
    """Complete checkpoints that are kept; older ones are removed."""
    grace_seconds: float = 30.0
    """After SIGTERM or SIGINT: the time for agreeing and saving a checkpoint, else the run is aborted."""
    batch_norm: Literal["mean", "reestimate"] = "mean"
    """Running statistics of the consensus model: the workers' mean, or re-estimated on training batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU for each rank where there are as many."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the model's parameters."""


@dataclass(frozen=True)
class EmulationSettings:
    """Time that passes as if the model were bigger or the machine slower, to try out a cluster on small means."""

    emulated_step_seconds: float = 0.0
    """Mean seconds of a step's computation, a third forward, the rest backward, slept; 0: as fast as it is."""
    emulated_jitter: float = 0.0
    """Standard deviation of that time relative to its mean; lognormal, another draw every step and rank."""
    emulated_rank_slowness: tuple[float, ...] | None = None
    """Factors on that time, one number a rank (1 1 1 2: the last takes twice as long); default: 1."""


FORWARD_SHARE = 1 / 3
"""Of the time of an emulated or simulated step, before the first gradient."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    algorithm: AlgorithmName = "lasgd"
    """allreduce (SGD-AR: gradients averaged before every step), lasgd, or sgp (OSGP with --tau 1 or more)."""
    worker: Literal["process", "host"] = "process"
    """What counts as one worker of lasgd and sgp: every process, or a host, whose processes average gradients."""
    seed: int = 0
    """Of the initial model, the shards, the order of samples and the augmentation."""
    run_dir: str | None = None
    """Directory of this run; default: runs/DATASET-ALGORITHM-TIME."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir, with the settings saved there; options override them."""
    trace: bool = False
    """Record every event of the algorithm, for scripts/replay."""
    evaluate: str | None = None
    """Evaluate this model file (model.pt of a run, with the settings saved beside it) and exit."""
    lasgd: LASGDSettings = field(default_factory=LASGDSettings)
    sgp: SGPSettings = field(default_factory=SGPSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    emulation: EmulationSettings = field(default_factory=EmulationSettings)


class SettingsError(ValueError):
    """A mistake in the settings, in one line that says what is wrong and what to do."""


def leaves(section: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every setting in `section` (a `Settings` or one of its sections), in order."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from leaves(value)
        else:
            yield item.name, value


def option(name: str) -> str:
    """The command-line option of the setting `name`."""
    return "--" + name.replace("_", "-")


INTERVALS = {
    "seed": "[0, 4294967296)",
    "tau_max": "[0, inf)",
    "elastic_alpha": "(0, 1]",
    "elastic_beta": "(0, 1]",
    "tau": "[0, inf)",
    "num_peers": "[1, 2]",
    "two_peer_rounds": "[0, inf)",
    "average_rounds": "[0, inf)",
    "slot_patience_seconds": "[0, inf)",
    "batch_size_per_rank": "[1, inf)",
    "dirichlet_alpha": "(0, 1e6]",
    "shard_proportions": "(0, inf)",
    "num_loader_workers": "[0, inf)",
    "image_size": "[1, inf)",
    "num_synthetic_samples": "[4, inf)",
    "num_synthetic_classes": "[2, inf)",
    "base_lr": "(0, inf)",
    "reference_batch_size": "[1, inf)",
    "momentum": "[0, 1)",
    "weight_decay": "[0, inf)",
    "max_grad_norm": "(0, inf)",
    "accumulation_steps": "[1, inf)",
    "warmup_epochs": "[0, inf)",
    "decay_epochs": "(0, inf)",
    "decay_factor": "(0, 1]",
    "epochs": "(0, 1e6]",
    "evaluate_every_epochs": "(0, 1e6]",
    "checkpoint_every_epochs": "(0, 1e6]",
    "keep_checkpoints": "[1, inf)",
    "grace_seconds": "(0, 1e6]",
    "emulated_step_seconds": "[0, 1e6]",
    "emulated_jitter": "[0, 10]",
    "emulated_rank_slowness": "(0, 1e6]",
}
"""Where every number has to lie; of a tuple, each of its numbers."""

USED_ONLY_WITH: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (tuple(item.name for item in fields(LASGDSettings)), "algorithm", ("lasgd",)),
    (tuple(item.name for item in fields(SGPSettings)), "algorithm", ("sgp",)),
    (("worker",), "algorithm", ("lasgd", "sgp")),
    (("num_peers", "two_peer_rounds"), "graph", ("exponential",)),
    (("data_dir",), "dataset", ("fashion-mnist", "cifar10", "imagefolder")),
    (("download",), "dataset", ("fashion-mnist", "cifar10")),
    (("num_loader_workers", "skip_corrupt"), "dataset", ("imagefolder",)),
    (("image_size",), "dataset", ("imagefolder", "synthetic")),
    (("num_synthetic_samples", "num_synthetic_classes"), "dataset", ("synthetic",)),
    (("dirichlet_alpha",), "shards", ("dirichlet",)),
    (("momentum", "nesterov"), "optimizer", ("sgd",)),
    (("decay_epochs", "decay_factor"), "schedule", ("step",)),
)
"""Settings, and the values of another setting with which alone they have an effect. With any other value
they must keep their defaults: so saved settings, which name every field, load again."""


def check(settings: Settings) -> None:
    """Refuses values out of range, settings that contradict each other and settings that would be ignored.

    Raises:
        SettingsError: the first thing found.
    """
    values, defaults = dict(leaves(settings)), dict(leaves(Settings()))
    for name, value in values.items():
        _check_value(name, value)
    for names, condition, allowed in USED_ONLY_WITH:
        for name in names:
            if values[condition] not in allowed and values[name] != defaults[name]:
                raise SettingsError(
                    f"{option(name)} has an effect only with {option(condition)} {' or '.join(allowed)}, "
                    f"not with {values[condition]}: leave it at {defaults[name]}"
                )
    if settings.resume and settings.run_dir is None:
        raise SettingsError("--resume needs the directory of the run to go on with: add --run-dir")
    if settings.resume and settings.trace:
        raise SettingsError("a trace begins with the run and cannot go on: add --no-trace")
    if settings.evaluate is not None and (settings.resume or settings.run_dir is not None or settings.trace):
        raise SettingsError("--evaluate does not train: remove --resume, --run-dir and --trace")
    _check_sgp(settings.sgp)
    _check_optimizer(settings)
    emulation = settings.emulation
    if emulation.emulated_step_seconds == 0 and emulation != EmulationSettings():
        raise SettingsError(
            "--emulated-jitter and --emulated-rank-slowness need --emulated-step-seconds above 0"
        )


def _check_sgp(sgp: SGPSettings) -> None:
    if sgp.num_peers == 2 and sgp.two_peer_rounds > 0:
        raise SettingsError("--two-peer-rounds has no effect with --num-peers 2: remove one of them")
    if sgp.biased and sgp.tau == 0 and sgp.slot_patience_seconds is None:
        raise SettingsError("--biased has no effect in synchronous SGP, where w is always 1: add --tau 1")


def _check_value(name: str, value: Any) -> None:
    if value == "":
        raise SettingsError(f"{option(name)} is empty: give a value or remove it")
    if name not in INTERVALS or value is None:
        return
    interval = INTERVALS[name]
    low, high = (float(end) for end in interval[1:-1].split(","))
    for number in value if isinstance(value, tuple) else (value,):
        above = number >= low if interval[0] == "[" else number > low
        below = number <= high if interval[-1] == "]" else number < high
        if not (above and below):
            raise SettingsError(f"{option(name)} is {number}: it must lie in {interval}")


def _check_optimizer(settings: Settings) -> None:
    optimizer = settings.optimizer
    if optimizer.optimizer == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        raise SettingsError("--nesterov needs a momentum: add --no-nesterov or set --momentum above 0")
    if optimizer.schedule == "step" and not optimizer.decay_epochs:
        raise SettingsError("--decay-epochs is empty: give an epoch or more, or take --schedule constant")
    if any(a >= b for a, b in zip(optimizer.decay_epochs, optimizer.decay_epochs[1:], strict=False)):
        raise SettingsError(f"--decay-epochs {optimizer.decay_epochs} must increase: put them in order")
    if optimizer.warmup_epochs > settings.training.epochs:
        raise SettingsError(
            f"--warmup-epochs {optimizer.warmup_epochs} is longer than the run of {settings.training.epochs} "
            f"epochs: shorten it or raise --epochs"
        )
