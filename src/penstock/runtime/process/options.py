"""The options of a training run. They are stated here once: `penstock train` takes them as its options, and workers get
them as JSON. This module does not import torch, so the command line can read it at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import JobError

DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Fields with a help text are options of `penstock train`; the command line sets the others itself."""

    resume: Path | None = field(
        default=None, metadata={"help": "checkpoint directory to resume from, written under any plan"}
    )
    init: Path | None = field(
        default=None, metadata={"help": "weights to start from: a .safetensors file, or a state_dict from torch.save"}
    )
    checkpoint_every: int = field(default=500, metadata={"help": "minibatches between checkpoints", "min": 1})
    keep_checkpoints: int = field(default=3, metadata={"help": "how many of the newest checkpoints to keep", "min": 1})
    tensorboard: Path | None = field(
        default=None,
        metadata={"help": "directory to write TensorBoard's event files to; needs the tensorboard package"},
    )
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The longest time that a worker waits for another."""
    quiet: bool = False
    """Whether progress is not shown."""
    job_name: str = ""
    """The name of the job file. Checkpoints record it."""

    def __post_init__(self) -> None:
        if self.resume is not None and self.init is not None:
            raise JobError("--resume goes on with a run, --init starts one from given weights; give one of them")
