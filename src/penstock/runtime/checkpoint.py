"""Checkpoints keyed by the model's own parameter names, so that any plan loads what any other wrote.

epoch-000001/
    checkpoint.json          what was done, and which file holds which tensor
    stage-0.safetensors      model/<name> and optimizer/<name>/<key>
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock import codec
from penstock.errors import FormatError
from penstock.run import Evaluation
from penstock.runtime.split import Section
from penstock.runtime.weights import Weights

INDEX = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    epoch: int
    """the epoch under way, or next"""
    minibatches: int
    """done of it"""
    steps: int
    """minibatches done in all epochs together"""
    loss_scale: tuple[float, int] | None = None
    """in fp16: the scale, and the updates since it changed"""
    evaluations: tuple[Evaluation, ...] = ()
    """so far"""
    files: Mapping[str, str]
    """tensor -> file"""

    FORMAT: ClassVar[str] = "penstock.checkpoint/1"


def directory_of(checkpoints: Path, steps: int) -> Path:
    return checkpoints / f"step-{steps:08d}"


def write_shard(directory: Path, stage: int, section: Section, weights: Weights, *, skip: frozenset[str]) -> list[str]:
    """Write one stage's tensors beside the checkpoint's final place; ``skip`` names what another stage writes."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, tensor in (*weights.parameters.items(), *section.buffers.items()):
        if name not in skip:
            tensors[f"model/{name}"] = tensor.detach()
    for name, parameter in weights.parameters.items():
        state = weights.optimizers.state_of(parameter) if name not in skip else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            elif isinstance(value, (int, float)):
                numbers[f"optimizer/{name}/{key}"] = value
    partial = _partial(directory)
    partial.mkdir(parents=True, exist_ok=True)
    contiguous = {key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()}
    save_file(contiguous, partial / _shard(stage), metadata={"numbers": json.dumps(numbers)})
    return [*tensors, *numbers]


def shard_files(names: Mapping[int, list[str]]) -> dict[str, str]:
    """Which file holds which tensor, from what each stage wrote."""
    return {name: _shard(stage) for stage, written in names.items() for name in written}


def commit(directory: Path, checkpoint: Checkpoint) -> None:
    """Make the checkpoint appear, once all shards are there."""
    codec.save(checkpoint, _partial(directory) / INDEX)
    if directory.exists():
        shutil.rmtree(directory)
    _partial(directory).replace(directory)


def read_index(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise FormatError(f"{directory}: no such checkpoint directory")
    return codec.load(Checkpoint, directory / INDEX)


def restore(directory: Path, section: Section, weights: Weights) -> Checkpoint:
    """Load a stage's tensors, whatever plan wrote them; returns where training was."""
    index = read_index(directory)
    reader = _Reader(directory, index)
    with torch.no_grad():
        for name, tensor in (*weights.parameters.items(), *section.buffers.items()):
            saved = reader.get(f"model/{name}")
            if saved is None or tuple(saved.shape) != tuple(tensor.shape):
                found = "is missing" if saved is None else f"has shape {list(saved.shape)}, not {list(tensor.shape)}"
                raise FormatError(f"{directory}: {name!r} {found}; this checkpoint is of another model")
            tensor.copy_(saved)
    for name, parameter in weights.parameters.items():
        state = reader.state_of(name)
        if state:
            weights.optimizers.set_state(parameter, state)
    return index


class _Reader:
    def __init__(self, directory: Path, index: Checkpoint) -> None:
        self.directory, self.index = directory, index
        self._open: dict[str, Any] = {}

    def get(self, key: str) -> Tensor | None:
        if key not in self.index.files:
            return None
        tensor: Tensor = self._file(self.index.files[key]).get_tensor(key)
        return tensor

    def state_of(self, name: str) -> dict[str, Any]:
        prefix = f"optimizer/{name}/"
        state: dict[str, Any] = {}
        for key, file in self.index.files.items():
            if key.startswith(prefix):
                opened = self._file(file)
                numbers = json.loads((opened.metadata() or {}).get("numbers", "{}"))
                state[key.removeprefix(prefix)] = numbers[key] if key in numbers else opened.get_tensor(key)
        return state

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.directory / name
            if Path(name).name != name or not path.is_file():
                raise FormatError(f"{path}: no such file, though {INDEX} names it")
            try:
                self._open[name] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise FormatError(f"{path}: not a complete safetensors file: {error}") from None
        return self._open[name]


def _shard(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def _partial(directory: Path) -> Path:
    return directory.with_name(directory.name + ".partial")
