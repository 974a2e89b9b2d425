"""Averaging that overlaps with the backward that completes a round: marked in the schedule, and done as marked."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from builders import SCHEDULES, flat_cluster, plans
from in_threads import FEW_BYTES, check_same_gradients, even_plan, looped_plan, profile_of, run_in_threads
from models import make_job
from penstock import plan_costs
from penstock.cost import in_buckets
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.runtime.emulate.emulate import emulate
from penstock.runtime.emulate.stand_ins import EmulatedTransport
from penstock.runtime.transport.base import Pending
from penstock.runtime.transport.threads import LocalTransport
from penstock.runtime.worker.assemble import Assembly, check_job
from penstock.runtime.worker.worker import Segment, Worker
from penstock.schedule import Action, Kind, Schedule, family
from penstock.simulate.conditions import CALM
from penstock.simulate.play import Meeting, Player

Marks = set[tuple[int, Action]]
"""Workers and the backwards during which they average."""


def custom(plan: Plan, *lines: str) -> Plan:
    return replace(plan, schedule="custom", custom=lines)


ONE_STAGE = even_plan(profile_of("conv"), (2,), "1f1b", microbatches=4)
PLANS: dict[str, Plan] = {
    "gpipe": replace(ONE_STAGE, schedule="gpipe"),
    "1f1b": ONE_STAGE,
    "1f1b, more replicas behind": even_plan(profile_of("conv"), (1, 2), "1f1b", microbatches=3),
    "1f1b, more replicas in front": even_plan(profile_of("conv"), (3, 1), "1f1b", microbatches=4),
    "pipedream": even_plan(profile_of("conv"), (2, 1), "pipedream"),
    "vertical": even_plan(profile_of("conv"), (2, 1), "vertical"),
    "2bw": even_plan(profile_of("conv"), (2, 1), "2bw", microbatches=4),
    "halves": even_plan(profile_of("conv"), (2, 1), "zb-h1", microbatches=4),
    "one lap": looped_plan(profile_of("conv"), 2, 1, "interleaved", 4, replicas=2),
    "two laps": looped_plan(profile_of("conv"), 1, 2, "interleaved", 4, replicas=2),
    "shared weights": even_plan(profile_of("tied"), (2, 1), "1f1b", microbatches=2),
    "custom": custom(ONE_STAGE, "0F0 0F2 0B0 0B2", "0F1 0F3 0B1 0B3"),
    "custom, halves and a whole backward last": custom(ONE_STAGE, "0F0 0F2 0I0 0W0 0B2", "0F1 0F3 0I1 0W1 0B3"),
    "custom, halves and half a backward last": custom(ONE_STAGE, "0F0 0F2 0I0 0B2 0W0", "0F1 0F3 0I1 0B3 0W1"),
}
NEVER = {"two laps", "shared weights", *(name for name in PLANS if "halves" in name)}


def marked(schedule: Schedule) -> Marks:
    return {
        (worker, action)
        for worker, program in enumerate(schedule.programs)
        for place, action in enumerate(program)
        if schedule.overlaps_averaging(worker, place)
    }


def job_name(plan: Plan) -> str:
    return "tied" if plan.pipeline.ties else "conv"


def done_by_workers(plan: Plan) -> Marks:
    """The backwards during which a worker on a thread has started an all-reduce."""
    found: Marks = set()
    doing: dict[int, bool] = {}

    class Noting(LocalTransport):
        def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
            doing[self.rank] = True
            return super().begin_all_reduce(tensor, workers)

    def note(assembly: Assembly) -> None:
        worker = assembly.worker

        def after(action: Action) -> None:
            if doing.pop(worker.rank, False) and action.kind is not Kind.SYNC:
                found.add((worker.rank, action))

        worker.on_action = after

    run_in_threads(plan, functools.partial(make_job, job_name(plan), samples=12), transport=Noting, prepare=note)
    return found


def done_by_the_simulator(plan: Plan, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Marks:
    """The backwards during which a bucket is final in the simulator."""
    found: Marks = set()
    final_s = Player._final_s

    def noting(self: Player, worker: int, stage: int, meeting: Meeting) -> list[float]:
        moments = final_s(self, worker, stage, meeting)
        if moments and min(moments) < self._free_s[worker]:
            found.add((worker, schedule.programs[worker][self._position[worker] - 1]))
        return moments

    with monkeypatch.context() as patched:
        patched.setattr(Player, "_final_s", noting)
        patched.setattr(plan_costs, "in_buckets", functools.partial(in_buckets, bucket_bytes=FEW_BYTES))
        Player(plan, schedule, CALM).run((1,) * schedule.microbatches)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_workers_and_simulator_average_during_just_the_backwards_that_the_schedule_marks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLANS[name], cluster=flat_cluster(len(PLANS[name].devices)))
    schedule = plan.schedule_for([plan.microbatches] * (12 // 4))
    assert bool(marked(schedule)) == (name not in NEVER)
    assert done_by_workers(plan) == marked(schedule)
    assert done_by_the_simulator(plan, schedule, monkeypatch) == marked(schedule)


@pytest.mark.parametrize("name", PLANS)
def test_where_workers_sum_by_themselves_the_simulator_averages_after_the_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = flat_cluster(len(PLANS[name].devices))
    plan = replace(PLANS[name], cluster=replace(cluster, levels=(replace(cluster.levels[0], ring_by_workers=True),)))
    schedule = plan.schedule_for([plan.microbatches] * 3)
    assert not done_by_the_simulator(plan, schedule, monkeypatch)


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("custom")])
def test_a_custom_schedule_averages_whole_gradients(name: str) -> None:
    check_same_gradients(PLANS[name], functools.partial(make_job, job_name(PLANS[name])))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(schedules=[name for name in SCHEDULES if family(name).trains]))
def test_any_emulated_plan_averages_during_just_the_backwards_that_the_schedule_marks(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker over links of any kind: where all-reduces are carried, as marked; elsewhere after backwards."""
    schedule = plan.schedule_for([plan.microbatches] * 3)
    assert family(plan.schedule).may_overlap or not marked(schedule)
    found: Marks = set()
    begun: dict[int, bool] = {}

    def begin(self: EmulatedTransport, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        begun[self.rank] = True
        return begin_all_reduce(self, tensor, workers)

    def run(self: Worker, segment: Segment) -> None:
        def after(action: Action) -> None:
            if begun.pop(self.rank, False) and action.kind is not Kind.SYNC:
                found.add((self.rank, action))

        self.on_action, self.sync.bucket_bytes = after, 1.0
        run_worker(self, segment)

    begin_all_reduce, run_worker = EmulatedTransport.begin_all_reduce, Worker.run
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedTransport, "begin_all_reduce", begin)
        patched.setattr(Worker, "run", run)
        emulate(plan, 3, dilation=1e-3, timeout_s=60)
    graph = plan.profile.graph
    carried = [plan.cluster.carries(stage.devices) and graph.parameters_of(stage.layers) for stage in plan.stages]
    assert found == {(worker, action) for worker, action in marked(schedule) if carried[action.stage]}


def test_batch_norm_over_replicas_keeps_averaging_out_of_backwards() -> None:
    """Batch norm sums inside backwards, in an order that averaging must not come into."""
    plan = replace(ONE_STAGE, profile=replace(ONE_STAGE.profile, sync_batch_norm=True))
    assert not marked(plan.schedule_for([4] * 3))
    check_job(replace(make_job("conv", samples=12), sync_batch_norm=True), plan)
    with pytest.raises(PlanError, match="sync_batch_norm"):
        check_job(replace(make_job("conv", samples=12), sync_batch_norm=True), ONE_STAGE)
