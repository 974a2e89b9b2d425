"""A job's model before its parts are given to workers: with its values, or without memory for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import JobError
from penstock.job import Job
from penstock.runtime.capture.build_replay import META, BuildReplay, record_build
from penstock.runtime.capture.split import Section


@dataclass(frozen=True)
class Blueprint:
    model: nn.Module
    replay: BuildReplay | None
    """For a model on the meta device, how to replay its building; None for a model that has its values."""

    def filled(self, section: Section, device: torch.device, held: Mapping[str, Tensor] | None = None) -> Section:
        """The section with values for its parameters and buffers. Buffers in ``held`` exist already and are used as
        they are."""
        if self.replay is None:
            return section
        module = copy.deepcopy(section.module)  # it has no values, and may share modules with other sections
        values = {id(buffer): held[name] for name, buffer in section.buffers.items() if held and name in held}
        for buffer in section.module.buffers():
            if id(buffer) not in values:
                values[id(buffer)] = self.value_of(buffer, device)
        for name, buffer in section.module.named_buffers(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = values[id(buffer)]
        return replace(
            section,
            module=module,
            parameters={name: self.copy_of(parameter, device) for name, parameter in section.parameters.items()},
            buffers={name: values[id(buffer)] for name, buffer in section.buffers.items()},
        )

    def copy_of(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """A copy of the parameter with its initial value."""
        value = parameter.detach().clone() if self.replay is None else self.value_of(parameter, device)
        return nn.Parameter(value, parameter.requires_grad)

    def whole(self, device: torch.device) -> nn.Module:
        """The model with all of its values, in this process."""
        _replace_tensors(self.model, lambda tensor: self.value_of(tensor, device))
        return self.model

    def value_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor if self.replay is None or not tensor.is_meta else self.replay.value(tensor).to(device)


def blueprint_of(job: Job, device: torch.device) -> Blueprint:
    """The job's model: on the device if the job has it as a module, otherwise built without memory."""
    if isinstance(job.model, nn.Module):
        without = [name for name, tensor in job.model.state_dict(keep_vars=True).items() if tensor.is_meta]
        if without:
            raise JobError(
                f"Job.model has parameters on the meta device ({without[0]!r} and {len(without) - 1} others), so their "
                "initial values are lost; give the function that builds it, as Job(model=lambda: Model(...))"
            )
        return Blueprint(job.model.to(device), None)
    if not callable(job.model):
        raise JobError(f"Job.model is a {type(job.model).__name__}; give an nn.Module, or a function that builds one")

    def build(make: Callable[[], Any] = job.model) -> Any:
        model = make()
        if isinstance(model, nn.Module):
            _replace_tensors(model, lambda tensor: tensor.to(META))
        return model

    try:
        model, replay = record_build(build, job.seed)
    except (NotImplementedError, RuntimeError) as error:
        raise JobError(
            f"Job.model() failed where tensors have shapes and no values: {error}; "
            "take what depends on values from Python or numpy instead, or give the model itself if a worker can hold it"
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(f"Job.model() built a {type(model).__name__}, not an nn.Module")
    return Blueprint(model, replay)


def _replace_tensors(model: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of a model. Tensors that are shared stay shared."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for held, name in _held_by(model):
        old = held[name]
        if id(old) not in replaced:
            made = new(old)
            replaced[id(old)] = (old, nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made)
        held[name] = replaced[id(old)][1]


def _held_by(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name in [name for name, value in held.items() if isinstance(value, Tensor)]:
                yield held, name
