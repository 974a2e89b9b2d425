"""A checkpoint on disk: a directory in the safetensors form of torch.distributed.checkpoint, and an index in JSON.

step-00000500/
    checkpoint.json           what was done, and the names of the model's state_dict
    shard-00001.safetensors   of each worker, the tensors that it gives:
                              model/<name>, optimizer/<name>/<key>, number/<name>/<key>

Nothing in it is keyed by stage or worker. It is written beside its place and appears there when all of it is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock import codec
from penstock.errors import FormatError, JobError
from penstock.job import Job
from penstock.run import INDEX, Evaluation

_PARTIAL = ".partial"
_REPLACED = f".old{_PARTIAL}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    epoch: int
    """the epoch under way, or next"""
    minibatches: int
    """done of it"""
    steps: int
    """minibatches done in all epochs together"""
    samples: int
    """of the data; with the next two it decides which sample is the next"""
    batch_size: int
    seed: int
    names: Mapping[str, str]
    """every key of the model's state_dict -> the tensor that holds it; tied weights share one"""
    loss_scale: tuple[float, int] | None = None
    """in fp16: the scale, and the updates since it changed"""
    evaluations: tuple[Evaluation, ...] = ()
    """so far"""
    job: str = ""
    """the name of the job file, for messages"""

    FORMAT: ClassVar[str] = "penstock.checkpoint/2"

    @classmethod
    def at_start(cls, job: Job, names: Mapping[str, str]) -> Checkpoint:
        data, batch = len(job.data), job.batch_size
        return cls(epoch=0, minibatches=0, steps=0, samples=data, batch_size=batch, seed=job.seed, names=names)

    def check_job(self, job: Job, source: Path) -> None:
        """Raise unless the next sample is the one that would have come next."""
        mine = {"samples": self.samples, "batch_size": self.batch_size, "seed": self.seed}
        given = {"samples": len(job.data), "batch_size": job.batch_size, "seed": job.seed}
        changed = [f"{key} {mine[key]}, now {given[key]}" for key in mine if mine[key] != given[key]]
        if changed:
            raise JobError(
                f"{source}: was written by {self._writer} with {'; '.join(changed)}: its place in the epoch would be "
                "another. Give the job what it had, or start anew from the weights (penstock export, then train --init)"
            )

    def check_model(self, names: Collection[str], source: Path) -> None:
        """Raise unless the model's state_dict has just these keys."""
        if set(names) == set(self.names):
            return
        missing, extra = sorted(set(names) - set(self.names)), sorted(set(self.names) - set(names))
        differs = f"{missing[0]!r} is missing" if missing else f"the model has no {extra[0]!r}"
        raise FormatError(f"{source}: {differs}; this checkpoint is of another model, written by {self._writer}")

    @property
    def _writer(self) -> str:
        return f"job {self.job}" if self.job else "a job"


def directory_of(checkpoints: Path, steps: int) -> Path:
    return checkpoints / f"step-{steps:08d}"


def save_shard(directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write one worker's tensors beside the checkpoint's place, together with all of ``group``; without one, alone.

    Returns when everyone's are written, and raises on all of them if one could not.
    """
    # Each worker a file of its own. The form that torch prefers would add a pickled table of contents.
    writer = _ShardWriter(str(_partial(directory)), save_distributed=True)
    save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes a worker's file straight from its tensors. Torch's own makes one string of bytes of them first, which
    takes as much memory again, and 1 s per GB in which no other thread of the worker runs."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        found = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        tensors = {key: data for key, data in found.items() if isinstance(data, Tensor)}
        if tensors:
            path = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            # said of every tensor, as torch does, that this is all of it
            whole = {key: {"saved_offsets": [0] * tensor.dim()} for key, tensor in tensors.items()}
            about = {"DCP_SHARDING_INFO": json.dumps(whole), "DCP_VERSION": "1.0", "format": "pt"}
            try:
                save_file(tensors, path, metadata=about)
            except SafetensorError as error:
                raise _as_os_error(error, path) from None
            _to_disk(path)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """safetensors has the system's number in its text alone."""
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(f"{path}: {error}")


def lacks_room(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def commit(directory: Path, checkpoint: Checkpoint) -> None:
    """Make the checkpoint appear, once all tensors are there.

    No single step replaces a directory, so one of the same name is renamed first. Until the new one has appeared,
    ``clean`` would bring it back.
    """
    partial, replaced = _partial(directory), _replaced(directory)
    (partial / INDEX).write_text(codec.dumps(checkpoint) + "\n", encoding="utf-8")
    _to_disk(partial / INDEX)
    _to_disk(partial)
    if directory.exists():
        _remove(replaced)
        directory.replace(replaced)
    partial.replace(directory)
    _to_disk(directory.parent)
    _remove(replaced)


def withdraw(directory: Path) -> None:
    """Remove what was written of a checkpoint that did not appear; one that it was to replace stays."""
    _remove(_partial(directory))
    if (_replaced(directory) / INDEX).exists() and not directory.exists():
        _replaced(directory).replace(directory)


def clean(checkpoints: Path) -> None:
    """Remove what a run left that ended while it wrote, and bring back what it was about to replace."""
    for left in checkpoints.glob(f"step-*{_REPLACED}"):
        withdraw(left.with_name(left.name.removesuffix(_REPLACED)))
    for left in checkpoints.glob(f"step-*{_PARTIAL}"):
        _remove(left)


def prune(complete: Sequence[Path], keep: int) -> None:
    """Remove all but the ``keep`` last. Each is out of sight before the first of its files goes."""
    for old in complete[:-keep]:
        _remove(old.replace(_partial(old)))


def _remove(directory: Path) -> None:
    """The index goes first: a checkpoint that is half removed must not look whole."""
    with contextlib.suppress(OSError):
        (directory / INDEX).unlink(missing_ok=True)
        shutil.rmtree(directory)


def read_index(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        was_replaced = _replaced(directory).is_dir()
        remedy = f"; a run ended while it replaced it: rename {_replaced(directory).name} to it" if was_replaced else ""
        raise FormatError(f"{directory}: no such checkpoint directory{remedy}")
    if not (directory / INDEX).is_file():
        raise FormatError(f"{directory}: holds no complete checkpoint ({INDEX} is missing); name one step-... of a run")
    return codec.load(Checkpoint, directory / INDEX)


class Tensors:
    """A checkpoint's tensors by name, read as they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with _readable(directory):
            metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        self.forms = {key: form for key, form in metadata.items() if isinstance(form, TensorStorageMetadata)}

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Raise unless all of these are there, in these shapes."""
        for key, tensor in wanted.items():
            form, name = self.forms.get(key), key.removeprefix("model/")
            if form is None or form.size != tensor.shape:
                found = "is missing" if form is None else f"has shape {list(form.size)}, not {list(tensor.shape)}"
                raise FormatError(f"{self.directory}: {name!r} {found}; this checkpoint is of another model")

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        self.check(tensors)
        reader = HuggingFaceStorageReader(str(self.directory))
        with _readable(self.directory), _quietly():
            load(dict(tensors), storage_reader=reader, no_dist=True)

    def load(self, keys: Collection[str]) -> dict[str, Tensor]:
        made = {key: torch.empty(self.forms[key].size, dtype=self.forms[key].properties.dtype) for key in keys}
        self.load_into(made)
        return made


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise FormatError(f"{directory}: a file of it is damaged or missing: {cause}") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise FormatError(f"{directory}: a file of it is damaged or missing: {error}") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """torch warns where a process is asked to load for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _partial(directory: Path) -> Path:
    return directory.with_name(directory.name + _PARTIAL)


def _replaced(directory: Path) -> Path:
    return directory.with_name(directory.name + _REPLACED)


def _to_disk(path: Path) -> None:
    """Before it is renamed, so that a machine that fails does not leave an empty file under the final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
