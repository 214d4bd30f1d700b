"""The settings of a run, as nested dataclasses: the one place that names them, with their defaults and units.

Owns names, types, defaults and the checks that need nothing but the settings themselves. Does not read files or the
command line (`command_line.py`), and imports neither torch nor MPI, so that `--help` answers at once.

Every field is a command-line option of the same name without its section (`--tau-max 5`) and a key of its section in
the YAML file (`lasgd: {tau_max: 5}`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AlgorithmName = Literal["allreduce", "lasgd"]


@dataclass(frozen=True)
class LASGDSettings:
    """Locally Asynchronous SGD (used by `--algorithm lasgd` only)."""

    tau_max: int = 1
    """Local steps after which a worker waits for the all-reduce under way; 0: never wait (unbounded)."""
    elastic_alpha: float = 1.0
    """Share of the distance to the centre z that a worker moves at a synchronisation (equation 6), in (0, 1]."""
    elastic_beta: float = 1.0
    """Share of the new mean in the centre z (equation 4), in (0, 1]; below 1 the centre remembers."""


@dataclass(frozen=True)
class DataSettings:
    """What is trained on what, and how the data is divided over the ranks."""

    dataset: Literal["digits", "fashion-mnist", "cifar10", "imagefolder", "synthetic"] = "digits"
    """digits comes with scikit-learn; imagefolder is the ImageNet layout (DATA_DIR/train/CLASS/*, DATA_DIR/val/CLASS/*)."""
    data_dir: str | None = None
    """Where the data set's files are; default: data/DATASET below the working directory."""
    download: bool = False
    """Fetch fashion-mnist or cifar10 from the internet if it is not in data_dir."""
    model: str = "cnn"
    """cnn (about 260 thousand parameters), resnet18-cifar, or the name of any torchvision classifier (resnet50)."""
    batch_size_per_rank: int | None = None
    """Samples of one backward pass on one rank; default: the smaller of 32 and the smallest shard."""
    shards: Literal["iid", "dirichlet"] = "iid"
    """How samples are dealt to ranks: at random, or with class shares drawn from Dirichlet(dirichlet_alpha)."""
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
    base_lr: float = 0.1
    """Learning rate for a global batch of reference_batch_size; it is scaled linearly to the run's global batch."""
    reference_batch_size: int = 256
    """The global batch for which base_lr holds."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = True
    """Nesterov's form of the momentum of sgd."""
    weight_decay: float = 1e-4
    max_grad_norm: float | None = None
    """Clip the gradient to this L2 norm before the optimizer's step; default: no clipping."""
    accumulation_steps: int = 1
    """Backward passes a step; their gradients are averaged."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    warmup_epochs: float = 0.0
    """Linear warm-up from the unscaled base_lr (from 0 where scaling does not raise it)."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which --schedule step multiplies the rate by decay_factor."""
    decay_factor: float = 0.1


@dataclass(frozen=True)
class TrainingSettings:
    """Length of the run, and what happens once in a while."""

    epochs: float = 20.0
    """Passes over the whole training set, counted in global samples."""
    evaluate_every_epochs: float = 1.0
    checkpoint_every_epochs: float = 5.0
    keep_checkpoints: int = 3
    """Complete checkpoints that are kept; older ones are removed."""
    grace_seconds: float = 30.0
    """After SIGTERM or SIGINT: the time within which the ranks agree and save a checkpoint, else the run is aborted."""
    batch_norm: Literal["mean", "reestimate"] = "mean"
    """Running statistics of the consensus model: the workers' mean, or re-estimated on training batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of the local rank where there is one."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the model's parameters."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    algorithm: AlgorithmName = "lasgd"
    """allreduce (SGD-AR: gradients averaged before every step) or lasgd."""
    worker: Literal["process", "host"] = "process"
    """What counts as one worker of the algorithm: every process, or all processes of a host together."""
    seed: int = 0
    run_dir: str | None = None
    """Directory of this run; default: runs/DATASET-ALGORITHM-TIME."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir, with the settings saved there; options given now override them."""
    trace: bool = False
    """Record every event of the algorithm, for scripts/replay."""
    evaluate: str | None = None
    """Evaluate this model file (model.pt of a run) on the validation set and exit."""
    lasgd: LASGDSettings = field(default_factory=LASGDSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
