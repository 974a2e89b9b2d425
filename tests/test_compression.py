"""Values that travel rounded: how much is lost, how much is saved, what training and plans make of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import chain_profile, flat_cluster, law, layer_seconds, plan_of, profiles, slow_law
from builders import profile_of as made_profile_of
from in_threads import CPU, even_plan, looped_plan, profile_of, run_in_threads
from models import make_job
from penstock import codec
from penstock.cluster import Cluster, Level
from penstock.compression import BLOCK, COMPRESSIONS
from penstock.cost import CostModel
from penstock.errors import PlanError
from penstock.graph import Layer, LayerGraph, Value
from penstock.plan import Plan, Stage
from penstock.plan_costs import PlanCosts
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.messages.compress import LOOKED_AT_EVERY, ErrorMeter, Rounded, packing_of
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.process.worker_files import edge_error, edge_errors
from penstock.runtime.transport.base import Channel, Pending
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.schedule import Action, Kind, Pipeline, build_schedule
from penstock.simulate import simulate
from test_worker import single_process
from test_worker_files import account

ROUNDED = ("bf16", "int8")
numbers = st.floats(-(2.0**127), 2.0**127, width=32)
shapes = st.lists(st.integers(0, 40), max_size=3)


def sent_bytes(value: Value, sends: str) -> float:
    """By the cost model."""
    graph = LayerGraph(layers=(Layer(id=0, name="l", kind="Any"),), values=(value,))
    profile = made_profile_of(graph, [layer_seconds(1.0)])
    return CostModel(profile=profile, cluster=flat_cluster(1), microbatch_size=1).sent_bytes(value, sends)


def there_and_back(tensor: Tensor, sends: str) -> Tensor:
    packing = packing_of(sends)
    layout, (sent,) = packing.pack([tensor])
    (entry,) = packing.wire_layouts(layout)
    assert (sent.dtype, tuple(sent.shape)) == (entry.dtype, entry.shape)
    arrived: Tensor
    (arrived,) = packing.unpack(layout, [sent])
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    return arrived


def in_blocks(tensor: Tensor) -> list[Tensor]:
    return list(tensor.flatten().split(BLOCK)) if tensor.numel() else []


@law
@given(st.lists(numbers, max_size=600), st.floats(1e-30, 1.0))
def test_bf16_keeps_eight_bits_of_every_number(values: list[float], scale: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float32) * scale
    lost = (there_and_back(tensor, "bf16").double() - tensor.double()).abs()
    assert bool((lost <= tensor.double().abs() * 2**-8 + 1e-40).all())


@law
@given(st.lists(numbers, max_size=600), st.floats(1e-30, 1.0))
def test_int8_is_within_half_a_step_of_the_largest_of_the_block(values: list[float], scale: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float32) * scale
    for before, after in zip(in_blocks(tensor), in_blocks(there_and_back(tensor, "int8")), strict=True):
        lost = (after.double() - before.double()).abs().max()
        assert float(lost) <= float(before.double().abs().max()) / 127 / 2 * (1 + 1e-4) + 2e-36


@law
@given(shapes, st.sampled_from(ROUNDED))
def test_any_shape_arrives_in_as_many_bytes_as_the_cost_model_says(shape: list[int], sends: str) -> None:
    tensor = torch.randn(shape)
    there_and_back(tensor, sends)
    (sent,) = packing_of(sends).pack([tensor]).tensors
    value = Value(name="v", producer=0, consumers=(), num_bytes=tensor.nbytes, dtype="float32")
    assert abs(sent.nbytes - sent_bytes(value, sends)) <= 4  # the last block may have fewer numbers than others


@pytest.mark.parametrize("sends", ROUNDED)
def test_zeros_and_the_largest_of_a_block_arrive_as_they_left(sends: str) -> None:
    tensor = torch.zeros(3, 300)
    assert torch.equal(there_and_back(tensor, sends), tensor)
    tensor[1, 7] = -2.0
    assert torch.equal(there_and_back(tensor, sends), tensor)


def test_bf16_keeps_infinities_and_what_is_no_number() -> None:
    tensor = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    arrived = there_and_back(tensor, "bf16")
    assert torch.equal(arrived[:3], tensor[:3])
    assert bool(arrived[3].isnan())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_makes_a_whole_block_no_numbers_rather_than_hide_one_that_is_none(bad: float) -> None:
    tensor = torch.ones(3 * BLOCK)
    tensor[BLOCK + 5] = bad
    arrived = there_and_back(tensor, "int8")
    assert torch.equal(arrived.isnan().view(3, BLOCK).all(dim=1), torch.tensor([False, True, False]))
    assert torch.equal(arrived[:BLOCK], tensor[:BLOCK])


OTHERS = [
    torch.arange(6).view(2, 3),
    torch.tensor([True, False]),
    torch.ones(2, dtype=torch.float64) / 3,
    torch.ones(2, dtype=torch.float16) / 3,
    torch.ones(2, dtype=torch.bfloat16) / 3,
    torch.zeros(0, 3),
]


@pytest.mark.parametrize("sends", ROUNDED)
@pytest.mark.parametrize("tensor", OTHERS, ids=lambda tensor: str(tensor.dtype))
def test_what_is_not_float32_travels_as_it_is(tensor: Tensor, sends: str) -> None:
    (sent,) = packing_of(sends).pack([tensor]).tensors
    assert sent.data_ptr() == tensor.data_ptr()
    assert torch.equal(there_and_back(tensor, sends), tensor)


# Through the mailbox.


class Counting(LocalTransport):
    """Counts what it sends, without headers."""

    def __init__(self, rank: int, exchange: LocalExchange) -> None:
        super().__init__(rank, exchange)
        self.sent_bytes: dict[Kind, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 0}

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        if tensor.dtype != torch.int64:
            self.sent_bytes[channel[1]] += tensor.nbytes
        return super().send(tensor, channel, number)


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("sends", ROUNDED)
def test_messages_whose_shapes_change_arrive_rounded_and_nothing_else_does(sends: str) -> None:
    """Both ways, integers and missing values beside, layouts that change under receives already posted."""
    sizes = [3, 3, 3, 700, 1, 3, 3, 0, 3]
    messages: list[list[Tensor | None]] = [[torch.randn(2, n), torch.tensor(n), None] for n in sizes]
    pipeline = Pipeline(workers=((0,), (1,)), reads=((), (0,)))
    schedule = build_schedule("1f1b", pipeline, [len(messages)], [2, 1])
    exchange = LocalExchange()
    came: list[list[list[Tensor | None]]] = [[], []]
    wrong: list[Exception] = []

    def work(rank: int) -> None:
        try:
            transport = LocalTransport(rank, exchange)
            mailbox = Mailbox(pipeline, {(0, 1): 3}, transport=transport, device=CPU, timeout_s=10.0, sends={0: sends})
            mailbox.begin(schedule, [2] * len(messages))
            for action in schedule.programs[rank]:
                mailbox.post_receives()
                if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
                    continue
                if (action.kind is Kind.FORWARD) == (action.stage == 0):
                    mailbox.send(action, 1 - rank, messages[action.index])
                else:
                    came[rank].append(mailbox.take(Action(1 - rank, action.kind, action.index), rank))
            mailbox.finish()
        except Exception as error:
            wrong.append(error)
            exchange.fail(str(error))

    in_threads([lambda: work(0), lambda: work(1)])
    assert not wrong
    for arrived in came:
        for (value, number, nothing), (left, same, _) in zip(arrived, messages, strict=True):
            assert value is not None
            assert left is not None
            assert torch.equal(value, there_and_back(left, sends))
            assert torch.equal(number, same)  # type: ignore[arg-type]
            assert nothing is None


def sending(plan: Plan, sends: str) -> Plan:
    return replace(plan, stages=tuple(replace(stage, sends=sends) for stage in plan.stages))


@pytest.mark.parametrize("sends", ROUNDED)
@pytest.mark.parametrize(("name", "schedule", "microbatches"), [("tied", "1f1b", 2), ("branches", "gpipe", 2)])
def test_training_with_compressed_edges_stays_close_to_exact(
    name: str, schedule: str, microbatches: int, sends: str
) -> None:
    plan = sending(even_plan(profile_of(name), (1, 2, 1), schedule, microbatches), sends)
    assemblies = run_in_threads(plan, lambda: make_job(name))
    expected = single_process(make_job(name), plan)
    start = make_job(name).model.state_dict()
    moved, off = 0.0, 0.0
    for assembly in assemblies:
        for stage in assembly.worker.stages.values():
            for key, found in stage.module.section.parameters.items():
                moved += float((expected[key] - start[key]).detach().square().sum())
                off += float((found - expected[key]).detach().square().sum())
    assert 0 < math.sqrt(off) < 0.05 * math.sqrt(moved)


def counted_bytes(plan: Plan, name: str) -> tuple[dict[Kind, int], list[tuple[int, int, str]]]:
    totals = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
    transports: list[Counting] = []

    def counting(rank: int, exchange: LocalExchange) -> Counting:
        transports.append(Counting(rank, exchange))
        return transports[-1]

    assemblies = run_in_threads(plan, lambda: make_job(name, samples=8, batch_size=4), transport=counting)
    for transport in transports:
        for kind, count in transport.sent_bytes.items():
            totals[kind] += count
    return totals, [key for assembly in assemblies for key in assembly.worker.mailbox.meter.errors]


@pytest.mark.parametrize("sends", ROUNDED)
def test_fewer_bytes_cross_the_wire_both_ways_as_many_as_predicted(sends: str) -> None:
    exact = even_plan(profile_of("conv"), (1, 1), "pipedream")
    plan = sending(exact, sends)
    plain, nothing = counted_bytes(exact, "conv")
    fewer, looked = counted_bytes(plan, "conv")
    assert nothing == []
    assert sorted(looked) == [(0, 1, "backward"), (0, 1, "forward")]
    share = COMPRESSIONS[sends].share
    for kind in plain:
        assert fewer[kind] == pytest.approx(share * plain[kind], rel=0.02)
    assert fewer[Kind.FORWARD] == pytest.approx(2 * PlanCosts(plan).output_bytes(0), rel=0.02)  # two microbatches


def test_stages_of_one_worker_hand_over_exactly() -> None:
    exact = looped_plan(profile_of("conv"), 1, 2, "interleaved", 2)
    plan = sending(exact, "int8")
    assert plan.compression == "exact"
    weights = [
        [p.detach() for stage in run_in_threads(each, lambda: make_job("conv"))[0].worker.stages.values()
         for p in stage.module.section.parameters.values()]
        for each in (exact, plan)
    ]  # fmt: skip
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ("name", "sends"), [("noisy", "exact"), ("noisy", "bf16"), ("noisy", "int8"), ("transformer", "int8")]
)
def test_verification_finds_gradients_within_what_the_compression_allows(tmp_path: Path, name: str, sends: str) -> None:
    plan = sending(even_plan(profile_of(name), (1, 1, 1), "1f1b", 2), sends)
    run_in_threads(plan, lambda: make_job(name), work=lambda assembly: save_gradients(assembly, tmp_path))
    found = compare(make_job(name), plan, tmp_path)
    assert found.passed
    assert (found.compression, found.tolerance) == (sends, COMPRESSIONS[sends].tolerance)
    assert (found.largest_difference > 1e-4) == (sends != "exact")


# What was lost.


def relative_error(values: Sequence[Tensor | None], sends: str) -> float:
    packing = packing_of(sends)
    assert isinstance(packing, Rounded)
    return packing.relative_error(values, packing.pack(values))


def test_the_relative_error_is_that_of_all_that_was_rounded() -> None:
    tensors = [torch.tensor([1.0, 0.003]), torch.tensor([7]), None, torch.tensor([100.2])]
    assert relative_error(tensors, "int8") == pytest.approx(
        0.003 / math.hypot(1, 0.003, 100.2), rel=1e-2
    )  # less than half a step of 1 / 127
    assert relative_error([torch.zeros(3)], "int8") == 0.0
    assert math.isnan(relative_error([torch.tensor([math.nan])], "bf16"))


def test_the_first_message_of_each_direction_is_looked_at_and_then_one_in_a_hundred() -> None:
    meter, looked = ErrorMeter(), []
    for number in range(2 * LOOKED_AT_EVERY + 1):
        meter.look((0, 1, "forward"), lambda number=number: looked.append(number) or 0.5)  # type: ignore[misc]
    meter.look((0, 1, "backward"), lambda: 0.25)
    assert looked == [0, LOOKED_AT_EVERY, 2 * LOOKED_AT_EVERY]
    assert meter.errors == {(0, 1, "forward"): (1.5, 3), (0, 1, "backward"): (0.25, 1)}


def test_errors_of_replicas_are_taken_together_and_one_that_is_no_number_is_said_to_be_none() -> None:
    plan = sending(plan_of(chain_profile([1.0, 1.0]), flat_cluster(3), [[0], [1]], [2, 1]), "int8")
    found = [edge_error(plan, (0, 1, "forward"), 0.3, 2), edge_error(plan, (0, 1, "backward"), math.nan, 1)]
    accounts = [
        account(0, compression=tuple(found)),
        account(1, compression=(replace(found[0], error=0.3, looked_at=1),)),
    ]
    forward, backward = edge_errors(accounts)
    assert (forward.direction, forward.sends, forward.looked_at) == ("forward", "int8", 3)
    assert forward.error == pytest.approx(0.2)
    assert (backward.direction, backward.error) == ("backward", None)


# Plans.


def narrow(bytes_per_s: float) -> Cluster:
    return flat_cluster(2, bytes_per_s=bytes_per_s)


def test_a_plan_says_how_each_stage_sends_and_its_file_too() -> None:
    plan = plan_of(chain_profile([1.0, 1.0], value_bytes=1000), narrow(1e3), [[0], [1]])
    plan = replace(plan, stages=(replace(plan.stages[0], sends="int8"), plan.stages[1]))
    assert codec.loads(Plan, codec.dumps(plan), "plan.json") == plan
    assert plan.compression == "int8"
    with pytest.raises(PlanError, match="compression 'int4' is unknown; choose one of exact, bf16, int8"):
        Stage(layers=(0,), devices=(0,), sends="int4")


def test_messages_cuts_and_what_is_shown_count_the_compressed_bytes_and_memory_the_whole() -> None:
    exact = plan_of(chain_profile([1.0, 1.0], value_bytes=1000), narrow(1e3), [[0], [1]], schedule="pipedream")
    plan = replace(exact, stages=(replace(exact.stages[0], sends="bf16"), exact.stages[1]))
    whole, half = PlanCosts(exact), PlanCosts(plan)
    for ends in [(0, 1), (1, 0)]:
        assert half.message_bytes(*ends) == whole.message_bytes(*ends) / 2
    assert half.cut_s(0) == whole.cut_s(0) / 2
    assert half.output_bytes(0) == half.input_bytes(1) == whole.output_bytes(0) / 2
    assert half.memory_bytes(0) == whole.memory_bytes(0)


@pytest.mark.parametrize(
    ("value", "is_smaller"),
    [
        (Value(name="v", producer=0, consumers=(), num_bytes=512), True),
        (Value(name="v", producer=0, consumers=(), num_bytes=512, differentiable=False), False),
        (Value(name="v", producer=0, consumers=(), num_bytes=512, differentiable=False, dtype="float32"), True),
        (Value(name="v", producer=0, consumers=(), num_bytes=512, dtype="bfloat16"), False),
        (Value(name="v", producer=0, consumers=(), num_bytes=512, dtype="float32, int64"), False),
    ],
)
def test_only_values_that_are_float32_become_smaller(value: Value, is_smaller: bool) -> None:
    assert sent_bytes(value, "exact") == 512
    assert (sent_bytes(value, "int8") < 512) == is_smaller


def test_a_profile_knows_which_values_are_float32() -> None:
    kinds = {value.dtype for value in profile_of("branches").graph.values}
    assert {"float32", "int64"} <= kinds


def test_nothing_is_compressed_unless_it_is_asked_for_and_helps() -> None:
    profile = chain_profile([1.0] * 4, value_bytes=1000, parameter_bytes=10**8)
    slow, fast = narrow(250.0), narrow(1e9)
    assert {stage.sends for stage in make_plan(profile, slow).stages} == {"exact"}
    assert make_plan(profile, fast, compress="int8") == make_plan(profile, fast)


def test_the_mildest_compression_that_keeps_the_pace_is_taken() -> None:
    """A balanced cut needs 8000 bytes in the 6 s a microbatch takes; parameters forbid data parallelism."""
    profile = chain_profile([1.0] * 4, batch_size=1, value_bytes=8000, parameter_bytes=10**8)
    for bytes_per_s, sends in [(1400.0, "exact"), (700.0, "bf16"), (350.0, "int8")]:
        plan = make_plan(profile, narrow(bytes_per_s), compress="int8")
        assert [stage.sends for stage in plan.stages] == [sends, "exact"]
        assert plan.prediction.seconds_per_minibatch == pytest.approx(6.0, rel=0.02)


@pytest.mark.parametrize(("schedule", "bytes_per_s"), [("pipedream", 700.0), ("1f1b", 700.0), ("interleaved", 2500.0)])
def test_every_schedule_may_be_compressed(schedule: str, bytes_per_s: float) -> None:
    profile = chain_profile([1.0] * 4, value_bytes=10_000, parameter_bytes=10**8)
    exact = make_plan(profile, narrow(bytes_per_s), schedule=schedule)
    plan = make_plan(profile, narrow(bytes_per_s), schedule=schedule, compress="int8")
    assert "int8" in {stage.sends for stage in plan.stages}
    assert plan.prediction.seconds_per_minibatch < exact.prediction.seconds_per_minibatch


def test_compression_may_keep_an_inference_plan_to_its_rate() -> None:
    """Two stages of two layers serve 0.5 samples/s, if 8000 bytes pass in two seconds."""
    profile, hints = chain_profile([1.0] * 4, batch_size=1, value_bytes=8000), Hints(straight=True)
    with pytest.raises(PlanError, match=r"cannot serve 0\.5 samples/s|keeps to --straight"):
        make_plan(profile, narrow(2100.0), schedule="inference", samples_per_s=0.5, hints=hints)
    plan = make_plan(profile, narrow(2100.0), schedule="inference", samples_per_s=0.5, hints=hints, compress="bf16")
    assert plan.compression == "bf16"


@slow_law
@given(profiles(max_layers=5), st.sampled_from(ROUNDED), st.sampled_from(["pipedream", "1f1b"]), st.floats(1e4, 1e9))
def test_a_compressed_plan_is_faster_by_a_hundredth_than_the_best_without(
    profile: Profile, sends: str, schedule: str, bytes_per_s: float
) -> None:
    cluster = Cluster(
        name="two", devices=flat_cluster(2).devices, levels=(Level(size=2, bytes_per_s=bytes_per_s, latency_s=1e-5),)
    )
    exact = make_plan(profile, cluster, schedule=schedule)
    plan = make_plan(profile, cluster, schedule=schedule, compress=sends)
    found, plain = plan.prediction, exact.prediction
    assert found.lower_bound_s <= found.seconds_per_minibatch
    if plan.compression == "exact":
        assert plan == exact
        return
    assert found.seconds_per_minibatch * 1.01 < plain.seconds_per_minibatch
    assert simulate(plan, 3).samples_per_s > 0
