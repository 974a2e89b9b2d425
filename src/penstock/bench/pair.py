"""One of the worker processes of ``penstock bench runtime``: measures every alternative in turn, several rounds."""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from penstock import codec
from penstock.bench.jobs import bench_job
from penstock.plan import Plan
from penstock.runtime.assemble import Assembly, assemble
from penstock.runtime.data import load_batch
from penstock.runtime.links import make_links, talking_pairs
from penstock.runtime.optimizers import Optimizers
from penstock.runtime.train import worker_process
from penstock.runtime.worker import Segment
from penstock.schedule import Kind

ROUNDS = 7
ROUND_S = 2.5
"""about how long each alternative runs at a time"""
FEWEST = 16
"""minibatches at a time, so that filling the pipeline weighs little"""
TORCH_MICROBATCHES = 4
TIMEOUT_S = 120.0


def main(case: str, directory: Path) -> None:
    plan = codec.load(Plan, directory / "plan.json")
    with worker_process(plan, TIMEOUT_S) as device:
        transport = make_links([], talking_pairs(plan), device=device, timeout_s=TIMEOUT_S).transport
        assembly = assemble(
            bench_job(case),
            plan,
            transport=transport,
            clock=time.perf_counter,
            device=device,
            timeout_s=TIMEOUT_S,
        )
        gc.freeze()  # as in training
        pair = _Pair(assembly)
        alternatives = {"limit": pair.limit, "penstock": pair.penstock, "torch": _TorchPipeline(pair).run}
        rates: dict[str, list[float]] = {name: [] for name in alternatives}
        for round_index in range(ROUNDS + 1):
            for name, measure in alternatives.items():
                dist.barrier()
                rate = measure()
                if round_index > 0:  # the first round warms caches and learns the shapes
                    rates[name].append(_slowest(rate))
        if dist.get_rank() == 0:
            (directory / "rates.json").write_text(json.dumps(rates))
        dist.barrier()


def _slowest(rate: float) -> float:
    """A pipeline is as fast as its slowest worker."""
    tensor = torch.tensor([rate], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor)


@dataclass(frozen=True)
class _SameBatch:
    """The same batch again and again: the pipeline is measured, not the loading of data."""

    inputs: Sequence[Any]
    target: Any

    def load(self, microbatch: int) -> tuple[Sequence[Any], Any]:
        return self.inputs, self.target


class _Pair:
    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.worker, self.plan = assembly, assembly.worker, assembly.plan
        (self.stage,) = self.worker.stages.values()
        self.batch_size = assembly.job.batch_size
        self.inputs, self.target = load_batch(assembly.job, range(self.batch_size), seed=0)
        self.flat = assembly.splitter.captured.bind(self.inputs)
        self.minibatches = max(FEWEST, round(ROUND_S / self.plan.prediction.seconds_per_minibatch))
        self.received, self.gradients = self._tensors_at_the_cut()

    def limit(self) -> float:
        """This stage's forward, backward and update in a loop, without any message; its peer does the same."""
        stage = self.stage.module
        start_s = time.perf_counter()
        for microbatch in range(self.minibatches):
            received = {
                name: value.detach().requires_grad_(value.requires_grad) for name, value in self.received.items()
            }
            stage.forward(microbatch, self.flat, received, self.target)
            stage.backward(microbatch, self.gradients, loss_weight=1.0, scale=1.0)
            stage.weights.step()
        stage.losses.clear()
        return self.minibatches * self.batch_size / (time.perf_counter() - start_s)

    def penstock(self) -> float:
        """The steady rate at the first stage, from one update to another."""
        segment = Segment(
            schedule=self.plan.schedule_for([1] * self.minibatches),
            samples=[self.batch_size] * self.minibatches,
            feed=_SameBatch(self.flat, self.target),
        )
        self.worker.events.clear()
        self.worker.run(segment)
        self.stage.module.losses.clear()
        ends = [event.end_s for event in self.worker.events if event.action.kind is Kind.STEP]
        first = len(ends) // 4
        return (len(ends) - 1 - first) * self.batch_size / (ends[-1] - ends[first])

    def _tensors_at_the_cut(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor | None]]]:
        """What this stage receives, from the stages before it run here; and gradients for what it sends."""
        values: dict[str, Tensor] = {}
        for stage in self.plan.stages[: self.stage.index + 1]:
            section = self.assembly.splitter.section(stage.layers)
            arguments = [self.flat[position] for position in section.reads] + [values[n] for n in section.receives]
            sent, _ = section.run(section.parameters, arguments)
            values.update(zip(section.sends, sent, strict=True))
        own = self.stage.module.section
        return (
            {name: values[name] for name in own.receives},
            {name: [torch.ones_like(values[name])] for name in own.sends},
        )


class _TorchPipeline:
    """torch's own 1F1B on copies of the same two sections."""

    def __init__(self, pair: _Pair) -> None:
        self.pair = pair
        own, plan, job = pair.stage, pair.plan, pair.assembly.job
        self.is_first, self.is_last = own.index == 0, own.module.section.makes_output
        module = copy.deepcopy(own.module.section.module)
        self.module, self.optimizers = module, Optimizers(job.optimizer, None, list(module.named_parameters()))
        rebuild = pair.assembly.splitter.captured.rebuild_output
        stage = PipelineStage(
            _OneValue(module, rebuild if self.is_last else None),
            own.index,
            len(plan.stages),
            pair.worker.device,
        )
        self.schedule = Schedule1F1B(stage, TORCH_MICROBATCHES, loss_fn=job.loss)

    def run(self) -> float:
        start_s = time.perf_counter()
        minibatches = self.pair.minibatches // 2  # as a rule it takes longer; each is a whole fill and drain anyway
        for _ in range(minibatches):
            self.module.zero_grad()
            if self.is_first:
                self.schedule.step(*self.pair.flat)
            else:
                losses: list[Tensor] = []
                self.schedule.step(target=self.pair.target if self.is_last else None, losses=losses)
            self.optimizers.step(0)
        return minibatches * self.pair.batch_size / (time.perf_counter() - start_s)


class _OneValue(nn.Module):
    """A section with one value in and one out, as torch's stages want it."""

    def __init__(self, module: nn.Module, rebuild: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.module, self.rebuild = module, rebuild

    def forward(self, *arguments: Tensor) -> Any:
        sent, output = self.module(*arguments)
        if self.rebuild is not None:
            return self.rebuild(output)
        return sent[0] if len(sent) == 1 else sent


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
