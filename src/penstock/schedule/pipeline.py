"""Who runs what, and the one rule of what an action waits for.

The deadlock check, the simulator and the worker all derive their waits and messages from here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Kind


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages laid over workers: the part of a plan that a schedule depends on."""

    workers: tuple[tuple[int, ...], ...]
    """of each stage, one worker per replica; a worker may have several stages"""
    reads: tuple[tuple[int, ...], ...]
    """of each stage, the earlier stages whose values it reads"""
    ties: tuple[tuple[int, ...], ...] = ()
    """groups of stages that share a parameter"""
    shares: tuple[tuple[int, ...], ...] = ()
    """of each stage, the microbatches of a round that each replica takes; by default one each"""
    meets_in_backwards: bool = False
    """Whether replicas all-reduce inside their backwards for another reason, as synchronised batch norm does."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise ScheduleError("a pipeline has at least one stage")
        if len(self.reads) != len(self.workers):
            raise ScheduleError(f"{len(self.workers)} stages but {len(self.reads)} lists of what they read")
        everyone = sorted({worker for replicas in self.workers for worker in replicas})
        if everyone != list(range(len(everyone))):
            raise ScheduleError(f"workers are {everyone}; number them 0, 1, 2 ... and use each")
        for stage, replicas in enumerate(self.workers):
            if len(set(replicas)) != len(replicas):
                raise ScheduleError(f"stage {stage} has workers {replicas}; each runs one of its replicas")
        for stage, sources in enumerate(self.reads):
            if any(source >= stage for source in sources):
                raise ScheduleError(f"stage {stage} reads from {sources}; a stage reads from earlier stages only")
        if not self.shares:
            object.__setattr__(self, "shares", tuple((1,) * len(replicas) for replicas in self.workers))
        for stage, (replicas, shares) in enumerate(zip(self.workers, self.shares, strict=True)):
            if len(shares) != len(replicas) or min(shares) < 1:
                raise ScheduleError(
                    f"stage {stage}: shares {shares} for {len(replicas)} replicas; each takes 1 or more"
                )

    @property
    def num_stages(self) -> int:
        return len(self.workers)

    @property
    def num_workers(self) -> int:
        return len(self.stages_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each worker runs."""
        stages: dict[int, list[int]] = defaultdict(list)
        for stage, replicas in enumerate(self.workers):
            for worker in replicas:
                stages[worker].append(stage)
        return tuple(tuple(stages[worker]) for worker in range(len(stages)))

    @cached_property
    def read_by(self) -> tuple[tuple[int, ...], ...]:
        readers: list[list[int]] = [[] for _ in self.workers]
        for reader, sources in enumerate(self.reads):
            for source in sources:
                readers[source].append(reader)
        return tuple(map(tuple, readers))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """One microbatch, one replica per stage, the same for its forward and its backward."""
        turns = self.turns[stage]
        return turns[microbatch % len(turns)]

    @cached_property
    def round_sizes(self) -> tuple[int, ...]:
        """Of each stage, the microbatches in which every replica has had its share."""
        return tuple(sum(shares) for shares in self.shares)

    def share_of(self, worker: int, stage: int) -> int:
        return self.shares[stage][self.workers[stage].index(worker)]

    @cached_property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the replica of each microbatch of a round: a larger share is spread over the round."""
        rounds = []
        for replicas, shares in zip(self.workers, self.shares, strict=True):
            slots = [((turn + 0.5) / share, place) for place, share in enumerate(shares) for turn in range(share)]
            rounds.append(tuple(replicas[place] for _, place in sorted(slots)))
        return tuple(rounds)

    def microbatches_of(self, worker: int, stage: int, microbatches: range) -> list[int]:
        """Of consecutive microbatches, those that a worker takes at a stage."""
        size, (start, stop) = self.round_sizes[stage], (microbatches.start, microbatches.stop)
        places = self._places[stage, worker]
        mine = [m for place in places for m in range(start + (place - start) % size, stop, size)]
        return sorted(mine) if len(places) > 1 else mine

    @cached_property
    def _places(self) -> dict[tuple[int, int], list[int]]:
        """Of each replica, given as (stage, worker), the microbatches of the first round that it takes."""
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for stage, turns in enumerate(self.turns):
            for place, worker in enumerate(turns):
                places[stage, worker].append(place)
        return places

    @cached_property
    def sync_stages(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that synchronise with it: itself and whatever it is tied to, over any chain."""
        groups = [{stage} for stage in range(self.num_stages)]
        for tie in self.ties:
            merged = set().union(*(groups[stage] for stage in tie))
            for stage in merged:
                groups[stage] = merged
        return tuple(tuple(sorted(group)) for group in groups)

    def sync_workers(self, stage: int) -> tuple[int, ...]:
        """The workers that run this stage's SYNC together."""
        return self._sync_workers[stage]

    @cached_property
    def _sync_workers(self) -> tuple[tuple[int, ...], ...]:
        together = {
            stages: tuple(sorted({worker for member in stages for worker in self.workers[member]}))
            for stages in set(self.sync_stages)
        }
        return tuple(together[stages] for stages in self.sync_stages)

    def synced_with(self, worker: int, stage: int) -> tuple[int, ...]:
        """The stages of a worker that one SYNC of it covers, which is named after the first; none where there is
        nobody to agree with."""
        return self._synced_with[worker, self.sync_stages[stage][0]]

    @cached_property
    def _synced_with(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Of each worker, and of the first of the stages that synchronise with each other."""
        own: dict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
        for stage, replicas in enumerate(self.workers):
            for worker in replicas:
                own[worker, self.sync_stages[stage][0]] += (stage,)
        alone = [key for key, stages in own.items() if len(stages) == len(self.sync_workers(stages[0])) == 1]
        return own | dict.fromkeys(alone, ())


def dependencies(action: Action, pipeline: Pipeline) -> tuple[Action, ...]:
    """The results that this action needs, each named after the action that makes it, as ``Action.result`` says. Where
    that one runs on another worker, a message travels.

    A SYNC needs no result by name: it is a meeting, and ends when everyone in ``participants`` has come.
    """
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return tuple(Action(source, Kind.FORWARD, microbatch) for source in pipeline.reads[stage])
    if kind is Kind.WEIGHT:
        return (Action(stage, Kind.BACKWARD, microbatch),)
    if kind in (Kind.BACKWARD, Kind.INPUT):
        gradients = tuple(Action(reader, Kind.BACKWARD, microbatch) for reader in pipeline.read_by[stage])
        return (Action(stage, Kind.FORWARD, microbatch), *gradients)
    return ()


def participants(action: Action, worker: int, pipeline: Pipeline) -> tuple[int, ...]:
    """The workers that must run this action at the same time."""
    return pipeline.sync_workers(action.stage) if action.kind is Kind.SYNC else (worker,)
