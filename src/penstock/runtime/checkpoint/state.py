"""What a worker holds of a run's state, by the model's own names: read off for checkpoints, and set from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.checkpoint.checkpoint import Checkpoint, Tensors, read_index
from penstock.runtime.checkpoint.portable import load_weights
from penstock.runtime.stage.buffers import ReplicaBuffers
from penstock.runtime.stage.optimizers import Optimizers
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.worker.assemble import Assembly


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    stages: Mapping[int, StageModule]
    """that this worker runs"""
    gives: Mapping[int, frozenset[str]]
    """of each, the names of what this worker writes: a tensor that several workers hold is written by one"""
    unused: Mapping[str, Tensor]
    """what the model has and no stage needs, at the first worker"""
    names: Mapping[str, str]
    """every key of the model's state_dict -> the name by which the stages know the tensor"""
    replica_buffers: Sequence[ReplicaBuffers] = ()
    """buffers that replicas average; they start again from what is loaded"""

    def snapshot(self, stage: int) -> dict[str, Tensor]:
        """Copies in host memory of what this worker gives of a stage, as it is now."""
        section, weights = self.stages[stage].section, self.stages[stage].weights
        found: dict[str, Tensor] = {}
        for name, tensor in (*weights.parameters.items(), *section.buffers.items()):
            if name in self.gives[stage]:
                found[f"model/{name}"] = tensor
        for name, parameter in weights.parameters.items():
            state = weights.optimizers.state_of(parameter) if name in self.gives[stage] else {}
            for field, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{name}/{field}"] = value
                elif isinstance(value, (int, float)):
                    found[f"number/{name}/{field}"] = torch.tensor(value, dtype=_EXACT[type(value)])
        return {key: _copied(tensor) for key, tensor in found.items()}

    def snapshot_of_unused(self) -> dict[str, Tensor]:
        return {f"model/{name}": _copied(tensor) for name, tensor in self.unused.items()}

    def restore(self, directory: Path) -> Checkpoint:
        """Take over what any plan has written; returns where training was."""
        index, tensors = read_index(directory), Tensors(directory)
        held = self._model()
        tensors.load_into({f"model/{name}": tensor for name, tensor in held.items()})
        self._loaded(held)
        parameters: dict[str, list[tuple[nn.Parameter, Optimizers]]] = defaultdict(list)
        for stage in self.stages.values():
            for name, parameter in stage.weights.parameters.items():
                parameters[name].append((parameter, stage.weights.optimizers))
        states: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in tensors.load([key for key in tensors.forms if _parsed(key)[1] in parameters]).items():
            kind, name, field = _parsed(key)
            states[name][field] = value.item() if kind == "number" else value
        for name, state in states.items():
            for parameter, optimizers in parameters[name]:
                optimizers.set_state(parameter, {field: _own(value) for field, value in state.items()})
        return index

    def initialise(self, file: Path) -> None:
        """Start from the weights of a safetensors file or a state_dict."""
        held = self._model()
        load_weights(file, self.names, held)
        self._loaded(held)

    def _model(self) -> dict[str, Tensor]:
        held = dict(self.unused)
        for stage in self.stages.values():
            held |= {name: parameter.detach() for name, parameter in stage.weights.parameters.items()}
            held |= stage.section.buffers
        return held

    def _loaded(self, held: Mapping[str, Tensor]) -> None:
        """Bring what depends on the model's tensors up to date with them, after all workers have loaded the same.

        Two stages of a worker that share a weight have a copy each; replicas average the changes of their buffers.
        """
        for stage in self.stages.values():
            for name, parameter in stage.weights.parameters.items():
                if parameter.data_ptr() != held[name].data_ptr():
                    parameter.data.copy_(held[name])
        for buffers in self.replica_buffers:
            buffers.agree()


def state_of(assembly: Assembly) -> WorkerState:
    plan, worker = assembly.plan, assembly.worker
    owners = plan.owners_of_parameters
    stages = {index: stage.module for index, stage in worker.stages.items()}
    gives: dict[int, frozenset[str]] = {}
    given: set[str] = set()
    for index, stage in stages.items():
        buffers = stage.section.buffers if worker.rank == plan.pipeline.workers[index][0] else ()
        mine = (name for name in stage.section.parameters if owners[name][0] == worker.rank)
        gives[index] = frozenset((*mine, *buffers)) - given
        given |= gives[index]
    blueprint = assembly.blueprint
    model = blueprint.model.state_dict(keep_vars=True)
    names = state_dict_names(blueprint.model)
    unused: dict[str, Tensor] = {}
    if worker.rank == 0:
        whole = assembly.splitter.section(range(len(assembly.splitter.captured.layers)))
        used = {*whole.parameters, *whole.buffers}
        unused = {
            name: blueprint.value_of(model[name], worker.device).detach() for name in names.values() if name not in used
        }
    return WorkerState(stages=stages, gives=gives, unused=unused, names=names, replica_buffers=assembly.buffers)


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """Every tensor of the model's state_dict -> the first name that the model gives it."""
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {key: first[id(t)] for key, t in model.state_dict(keep_vars=True).items() if id(t) in first}


_EXACT = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _parsed(key: str) -> tuple[str, str, str]:
    """What it is, the parameter's name (none for the model's own tensors), and what the optimizer calls it."""
    kind, _, rest = key.partition("/")
    name, _, field = rest.rpartition("/")
    return (kind, name, field) if kind != "model" else (kind, "", rest)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
