"""The model in one process: what workers are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from penstock.job import Job
from penstock.plan import Plan
from penstock.runtime.capture.capture import call_arguments
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section
from penstock.runtime.stage.batch_norm import normalises_by_batch
from penstock.runtime.worker.assemble import capture_as_profiled
from penstock.runtime.worker.data import to_device


@dataclass(frozen=True)
class Reference:
    """The model's forward on the batches of some microbatches at once, each with its key of random numbers."""

    parameters: Mapping[str, nn.Parameter]
    device: torch.device
    """of the kind that workers here compute on, since each kind draws other numbers"""
    compute: Callable[[Sequence[Any], Sequence[int]], Any]

    def forward(self, batches: Sequence[Any], keys: Sequence[int]) -> Any:
        return self.compute([to_device(batch, self.device) for batch in batches], keys)


def reference_of(job: Job, plan: Plan) -> Reference:
    """The unmodified model; if it may draw random numbers, its captured graph, which draws them as workers do."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    splitter, blueprint = capture_as_profiled(job, plan.profile, device)
    captured = splitter.captured
    if not splitter.draws:
        model = blueprint.whole(device)

        def plain(batches: Sequence[Any], keys: Sequence[int]) -> Any:
            args, kwargs = call_arguments(joined(batches))
            _copy_buffers(model)
            return model(*args, **kwargs)

        return Reference(dict(model.named_parameters()), device, plain)
    section = blueprint.filled(splitter.section(range(len(captured.layers))), device)

    def drawn(batches: Sequence[Any], keys: Sequence[int]) -> Any:
        outputs = _in_lock_step(section, [captured.bind(batch) for batch in batches], keys)
        return joined([captured.rebuild_output(output) for output in outputs])

    return Reference(section.parameters, device, drawn)


def _copy_buffers(model: nn.Module) -> None:
    """Replace buffers by copies: the next forward may write to them, and the backward of earlier microbatches may need
    them as they were."""
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(buffer, buffer.clone())


def joined(batches: Sequence[Any]) -> Any:
    """Several batches as one."""
    if len(batches) == 1:
        return batches[0]
    return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *batches)


def _in_lock_step(section: Section, arguments: Sequence[Sequence[Any]], keys: Sequence[int]) -> list[Any]:
    """The model's output for each microbatch. Only batch norm takes them together, as synchronised replicas do."""
    if len(keys) == 1:
        with drawing(keys[0]):
            return [section.run(section.parameters, [arguments[0][position] for position in section.reads])[1]]
    section.hold(section.parameters)
    passes = [fx.Interpreter(section.module) for _ in keys]
    for each, given in zip(passes, arguments, strict=True):
        each.args_iter = iter([given[position] for position in section.reads])
    for node in section.module.graph.nodes:
        if normalises_by_batch(node):
            rest = passes[0].fetch_args_kwargs_from_env(node)[0][1:]
            rows = [each.env[node.args[0]] for each in passes]
            made = node.target(torch.cat(rows), *rest).split([len(part) for part in rows])
        else:
            made = []
            for each, key in zip(passes, keys, strict=True):
                with drawing(key):
                    made.append(each.run_node(node))
        for each, value in zip(passes, made, strict=True):
            each.env[node] = value
    return [output for _, output in made]
