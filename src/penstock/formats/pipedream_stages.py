"""PipeDream's runtime configuration: which stage each module is in, and which ranks run each stage.

PipeDream generates one module per stage of the plan, and a last one for the loss, which runs in the last stage:

    module_to_stage_map [0, 1, 2, 2]     three stages, then the loss
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from penstock import codec
from penstock.errors import FormatError
from penstock.formats.reading import decode_json
from penstock.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StageMap:
    """The keys of the file. Stages are text, as JSON's keys are."""

    module_to_stage_map: tuple[int, ...]
    stage_to_rank_map: Mapping[str, tuple[int, ...]]
    stage_to_depth_map: Mapping[str, int] | None = None
    """Microbatches that each replica takes before its first backward."""

    def __post_init__(self) -> None:
        stages = [str(stage) for stage in range(len(self.stage_to_rank_map))]
        self._check_stages("stage_to_rank_map", self.stage_to_rank_map, stages)
        self._check_ranks()
        if not self.module_to_stage_map:
            raise FormatError("module_to_stage_map: empty; it has a stage for each module and for the loss")
        for i, number in enumerate(self.module_to_stage_map):
            if str(number) not in stages:
                raise FormatError(
                    f"module_to_stage_map[{i}]: stage {number} is not in stage_to_rank_map; give it ranks"
                )
        for stage in stages:
            if int(stage) not in self.module_to_stage_map:
                raise FormatError(f"stage_to_rank_map.{stage}: no module is in this stage; leave it out")
        if self.stage_to_depth_map is not None:
            self._check_stages("stage_to_depth_map", self.stage_to_depth_map, stages)
            for stage, depth in self.stage_to_depth_map.items():
                if depth < 0:
                    raise FormatError(f"stage_to_depth_map.{stage}: {depth} microbatches; expected 0 or more")

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, in order."""
        return tuple(self.stage_to_rank_map[str(stage)] for stage in range(len(self.stage_to_rank_map)))

    @staticmethod
    def _check_stages(field: str, found: Mapping[str, object], stages: list[str]) -> None:
        if not stages:
            raise FormatError(f"{field}: empty; a pipeline has at least one stage")
        for stage in (*stages, *found):
            if stage not in found or stage not in stages:
                raise FormatError(f"{field}.{stage}: stages are numbered 0 to {len(stages) - 1} without a gap")

    def _check_ranks(self) -> None:
        seen: set[int] = set()
        for stage, ranks in self.stage_to_rank_map.items():
            if not ranks:
                raise FormatError(f"stage_to_rank_map.{stage}: no rank; a stage runs on at least one")
            for rank in ranks:
                if rank < 0 or rank in seen:
                    raise FormatError(
                        f"stage_to_rank_map.{stage}: rank {rank} is negative or used before; use each once"
                    )
                seen.add(rank)


def parse_stage_map(text: str, source: str) -> StageMap:
    return decode_json(StageMap, text, source)


def stage_map_text(stage_map: StageMap) -> str:
    items = [(key, item) for key, item in codec.encode(stage_map).items() if item is not None]
    lines = [f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in items]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def hybrid_map(plan: Plan) -> StageMap:
    """The plan's own stages and replicas. Rank r is the r-th of the devices that the plan uses."""
    rank_of = {device: rank for rank, device in enumerate(sorted(plan.devices))}
    return StageMap(
        module_to_stage_map=_modules(plan),
        stage_to_rank_map={
            str(i): tuple(sorted(rank_of[device] for device in stage.devices)) for i, stage in enumerate(plan.stages)
        },
        stage_to_depth_map={str(i): stage.in_flight - 1 for i, stage in enumerate(plan.stages)},
    )


def data_parallel_map(plan: Plan) -> StageMap:
    """The same modules, all of them in one stage on all ranks."""
    return StageMap(
        module_to_stage_map=(0,) * len(_modules(plan)),
        stage_to_rank_map={"0": tuple(range(len(plan.devices)))},
    )


def model_parallel_map(plan: Plan) -> StageMap:
    """The plan's stages with one rank each."""
    return StageMap(
        module_to_stage_map=_modules(plan),
        stage_to_rank_map={str(stage): (stage,) for stage in range(len(plan.stages))},
    )


def _modules(plan: Plan) -> tuple[int, ...]:
    stages = range(len(plan.stages))
    return (*stages, stages[-1])
