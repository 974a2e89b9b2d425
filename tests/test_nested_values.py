"""Values that hold several tensors: they cross cuts, and their gradients return tensor by tensor."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from builders import layer_seconds
from in_threads import check_same_gradients, even_plan, profile, recomputing, run_in_threads
from models import sgd
from penstock import Job, codec
from penstock.cluster import local_cluster
from penstock.compression import COMPRESSIONS
from penstock.cost import CostModel
from penstock.errors import GraphError, WorkerError
from penstock.graph import Value, ValueTensor
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.capture import capture as capturing
from penstock.runtime.emulate.emulate import emulate
from penstock.runtime.measure import measure
from penstock.runtime.messages.compress import packing_of
from penstock.runtime.messages.header import decode_header, described_bytes, encode_header
from penstock.runtime.messages.packing import EXACT, Described, wire_layouts
from penstock.runtime.messages.values import CODECS, gradient_of, obstacle, tensors_in
from penstock.runtime.worker import assemble
from penstock.runtime.worker.evaluate import Evaluator
from test_compression import sending
from test_shapes import in_two_threads
from test_worker import asynchronous_reference, check_same_weights, single_process

WIDTH = 6


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    hidden: Any
    mask: Any = None


torch.export.register_dataclass(Output)


@dataclass
class Unregistered:
    hidden: Any


class Block(nn.Module):
    """Computes on one tensor; neither export nor fx sees through it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def work(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x))) if float(x.detach().sum()) > -1e9 else x


class DictStart(Block):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.work(x), "skip": x + 1, "mask": x > 0, "depth": 0, "name": "start", "cache": None}


class DictBlock(Block):
    """Changes the dict that it is given."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = self.work(state["hidden"]) * state["mask"] + state["hidden"]
        assert (state["name"], state["cache"]) == ("start", None)
        state["hidden"], state["depth"] = hidden / (1 + state["depth"]), state["depth"] + 1
        return state


class DictEnd(Block):
    def forward(self, state: dict[str, Any]) -> Tensor:
        return self.work(state["hidden"]) + state["skip"] * state["depth"]


class TupleStart(Block):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.work(x), None, x.shape[1], [x.detach() > 0]


class TupleBlock(Block):
    """What was None becomes a tensor that later blocks read."""

    def forward(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, before, width, (mask,) = given
        return self.work(hidden) / width, hidden if before is None else hidden + before, width, [mask]


class TupleEnd(Block):
    def forward(self, given: tuple[Any, ...]) -> Tensor:
        hidden, before, _, (mask,) = given
        return self.work(hidden) + before * mask


class OverwritingBlock(Block):
    """Writes into a tensor of the value that it is given."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = self.work(state["hidden"])
        return {**state, "skip": state["skip"].mul_(2), "hidden": hidden, "depth": 1}


class ObjectStart(Block):
    def forward(self, x: Tensor) -> Output:
        return Output(self.work(x), x > 0)


class ObjectBlock(Block):
    def forward(self, given: Output) -> Pair:
        return Pair(self.work(given.hidden), {1: given.mask, None: [given.hidden]})


class ObjectEnd(Block):
    def forward(self, given: Pair) -> Tensor:
        (before,) = given.second[None]
        return self.work(given.first) + before * given.second[1]


class PairBlock(Block):
    def forward(self, given: Pair) -> Pair:
        return given._replace(first=self.work(given.first))


CHAINS: dict[str, tuple[type[Block], ...]] = {
    "dict": (DictStart, DictBlock, DictBlock, DictEnd),
    "tuple": (TupleStart, TupleBlock, TupleBlock, TupleEnd),
    "object": (ObjectStart, ObjectBlock, PairBlock, ObjectEnd),
    "overwritten": (DictStart, OverwritingBlock, OverwritingBlock, DictEnd),
}


def make_job(name: str, samples: int = 11) -> Job:
    torch.manual_seed(0)
    data = [(x, x.flip(0)) for x in torch.randn(samples, WIDTH)]
    model = nn.Sequential(*(block() for block in CHAINS[name]))
    return Job(model=model, data=data, loss=nn.functional.mse_loss, optimizer=sgd, batch_size=4)


@pytest.fixture(autouse=True)
def _captured_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = functools.partial(capturing.capture, only="module")
    monkeypatch.setattr(measure, "capture", whole)
    monkeypatch.setattr(assemble, "capture", whole)


@functools.cache
def profiled(name: str) -> Profile:
    return profile(make_job(name))


def planned(name: str, replicas: tuple[int, ...], schedule: str, microbatches: int = 1) -> Plan:
    return even_plan(profiled(name), replicas, schedule, microbatches)


# Training.


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 2), ("zb-h1", 2), ("pipedream", 1)])
@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_gradients_are_those_of_one_process(
    name: str, schedule: str, microbatches: int, replicas: tuple[int, ...]
) -> None:
    plan = planned(name, replicas, schedule, microbatches)
    check_same_gradients(plan, functools.partial(make_job, name))


@pytest.mark.parametrize("name", ["object", "overwritten"])
def test_registered_classes_and_named_tuples_cross_and_what_is_overwritten_too(name: str) -> None:
    check_same_gradients(planned(name, (1, 1, 1, 1), "1f1b", 2), functools.partial(make_job, name))


@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_a_stage_may_recompute(name: str) -> None:
    check_same_gradients(recomputing(planned(name, (1, 1, 1), "1f1b", 2)), functools.partial(make_job, name))


@pytest.mark.parametrize("name", ["dict", "tuple", "object"])
def test_training_is_that_of_one_process(name: str) -> None:
    """The last batch is smaller, so that layouts change, and two epochs pass."""

    def make() -> Job:
        return replace(make_job(name), epochs=2)

    plan = planned(name, (1, 2), "1f1b", 3)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


def test_asynchronous_training_uses_the_weights_of_each_forward() -> None:
    plan, make = planned("dict", (1, 1, 1), "pipedream"), functools.partial(make_job, "dict", samples=41)
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan))


@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_gradients_with_bf16_are_within_its_tolerance(name: str) -> None:
    plan = sending(planned(name, (1, 1), "1f1b", 2), "bf16")
    check_same_gradients(plan, functools.partial(make_job, name), tolerance=COMPRESSIONS["bf16"].tolerance)


def test_held_out_data_is_evaluated_through_the_same_cuts() -> None:
    found: list[dict[str, float]] = []

    def evaluate(assembly: assemble.Assembly) -> None:
        found.append(evaluators[assembly.worker.rank].run())

    evaluators: dict[int, Evaluator] = {}

    def prepare(assembly: assemble.Assembly) -> None:
        evaluators[assembly.worker.rank] = Evaluator(assembly, assembly.job.data)

    run_in_threads(
        planned("dict", (1, 1), "1f1b", 2), lambda: make_job("dict", samples=8), prepare=prepare, work=evaluate
    )
    job = make_job("dict", samples=8)
    inputs, targets = (torch.stack(each) for each in zip(*job.data, strict=True))  # type: ignore[call-overload]
    expected = nn.functional.mse_loss(job.model.eval()(inputs), targets).item()
    assert [each["loss"] for each in found] == pytest.approx([expected] * 2)


# Profiles and plans.


def test_a_profile_has_the_tensors_of_a_value_and_does_not_mark_it() -> None:
    for name in CHAINS:
        found = profiled(name)
        assert found.front_end == "module"
        assert [value.opaque for value in found.graph.values[:-1]] == [""] * (len(CHAINS[name]) - 1)
    value = profiled("dict").graph.values[0]
    size = 4 * 4 * WIDTH
    assert value.tensors == (
        ValueTensor(num_bytes=size, dtype="float32"),
        ValueTensor(num_bytes=size, dtype="float32", differentiable=False),
        ValueTensor(num_bytes=size // 4, dtype="bool", differentiable=False),
    )
    assert (value.num_bytes, value.differentiable, value.dtype) == (2 * size + size // 4, True, "bool, float32")
    assert profiled("dict").graph.values[-1].tensors == ()
    assert codec.loads(Profile, codec.dumps(profiled("dict")), "profile.json") == profiled("dict")


def test_the_planner_may_cut_there() -> None:
    found = profiled("dict")
    rows = (layer_seconds(1.0),) * len(found.graph.layers)
    slow = replace(found, seconds=dict.fromkeys(found.seconds, rows), other_sizes=())
    plan = make_plan(slow, local_cluster(2), schedule="pipedream", hints=Hints(straight=True))
    assert len(plan.stages) == 2


SEVERAL = Value(
    name="v",
    producer=0,
    consumers=(1,),
    num_bytes=1000,
    tensors=(
        ValueTensor(num_bytes=600, dtype="float32"),
        ValueTensor(num_bytes=300, dtype="float32", differentiable=False),
        ValueTensor(num_bytes=100, dtype="int64", differentiable=False),
    ),
)


def test_costs_count_what_is_rounded_and_what_has_a_gradient() -> None:
    chain = profiled("dict")
    model = CostModel(profile=chain, cluster=local_cluster(1), microbatch_size=4)
    value = chain.graph.values[0]
    a_float = 4 * 4 * WIDTH
    assert model.sent_bytes(value, "exact") == value.num_bytes
    assert model.sent_bytes(value, "bf16") == pytest.approx(a_float + a_float // 4)
    assert model.gradient_bytes(value, "exact") == pytest.approx(a_float)
    assert model.gradient_bytes(value, "bf16") == pytest.approx(a_float / 2)
    plan = planned("dict", (1, 1, 1, 1), "1f1b")
    assert plan.stages[0].layers == (0,)
    assert PlanCosts(plan).message_bytes(0, 1) == value.num_bytes
    assert PlanCosts(plan).message_bytes(1, 0) == pytest.approx(a_float)


def test_a_value_is_as_large_as_its_tensors() -> None:
    with pytest.raises(GraphError, match=r"'v': num_bytes is 999, but its tensors have 1000"):
        replace(SEVERAL, num_bytes=999)


def test_such_values_can_be_emulated() -> None:
    for sends in COMPRESSIONS:
        plan = sending(planned("dict", (1, 1), "1f1b", 2), sends)
        assert emulate(plan, minibatches=2).result.seconds > 0


# Codecs.


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(two, Tensor)
            and (one.dtype, one.requires_grad, one.stride()) == (two.dtype, two.requires_grad, two.stride())
            and torch.equal(one, two)
        )
    if type(one) is not type(two):
        return False
    (ours, mine), (theirs, other) = (pytree.tree_flatten(each) for each in (one, two))
    if mine != other:
        return False
    if mine.is_leaf():
        return bool(one == two)
    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def there_and_back(value: Any, sends: str = "exact") -> Any:
    packing = packing_of(sends)
    layout, tensors = packing.pack([value])
    header, description = encode_header(layout)
    rows = header.tolist()
    assert described_bytes(rows) == (0 if description is None else len(description))
    told = decode_header(rows, description)
    assert told == layout
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == [(e.dtype, e.shape) for e in packing.wire_layouts(told)]
    (arrived,) = packing.unpack(told, tensors)
    return arrived


TENSORS = [
    torch.ones(2, 3),
    torch.arange(6).view(2, 3).t(),
    torch.tensor(True),
    torch.zeros(0, 3),
    torch.ones(2).requires_grad_(),
]
leaves = st.one_of(
    st.sampled_from(TENSORS), st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
)
keys = st.one_of(st.text(max_size=3), st.integers(0, 3).map(lambda n: n + 2), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees)
def test_any_nesting_arrives_as_it_left(value: Any) -> None:
    assert obstacle(value) == ""
    assert same(there_and_back(value), value)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(trees, trees), min_size=1, max_size=6))
def test_any_sequence_of_values_arrives_in_order(messages: list[tuple[Any, Any]]) -> None:
    for found in in_two_threads([list(each) for each in messages], [2] * len(messages)):
        assert not isinstance(found, Exception), found
        expected = [*messages, *messages]
        assert all(same(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))


def test_outputs_of_hugging_face_are_containers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(2), torch.ones(2)))
    assert obstacle(value) == ""
    assert same(there_and_back({"output": value}), {"output": value})


def test_numbers_that_are_equal_but_of_another_type_are_another_layout() -> None:
    values: list[Any] = [(1, torch.ones(2)), (True, torch.ones(2)), (1.0, torch.ones(2)), (1, torch.ones(2))]
    for found in in_two_threads([[value] for value in values], [2] * 4):
        assert [type(number) for ((number, _),) in found] == 2 * [int, bool, float, int]


def test_a_structure_that_stays_is_announced_once() -> None:
    value = {"a": torch.ones(2), "b": None}
    layouts = [EXACT.pack([value]).layout for _ in range(2)]
    assert layouts[0] == layouts[1]
    assert layouts[0] != EXACT.pack([{"a": torch.ones(2), "b": 1}]).layout


def test_only_float32_tensors_are_rounded() -> None:
    value = {"a": torch.full((3,), 1 / 3), "b": torch.full((3,), 1 / 3, dtype=torch.float64), "c": torch.arange(3)}
    arrived = there_and_back(value, "bf16")
    assert torch.equal(arrived["a"], value["a"].to(torch.bfloat16).float())
    assert all(torch.equal(arrived[key], value[key]) for key in "bc")


def test_what_cannot_be_sent_is_named() -> None:
    class Local(NamedTuple):
        x: int

    assert obstacle(Unregistered(torch.ones(2))) == "Unregistered"
    assert obstacle({"a": torch.ones(2), "b": [Unregistered(1)]}) == "dict that holds a list that holds a Unregistered"
    assert obstacle((torch.eye(2).to_sparse(), 1)) == "tuple that holds a sparse_coo tensor"
    assert obstacle({(1, 2): torch.ones(2)}) == "dict with a tuple as key"
    assert obstacle(Local(1)) == "Local, which its module does not name"
    assert obstacle([torch.zeros([1] * 9)]) == "list that holds a tensor of 9 dimensions"
    assert obstacle(torch.Size([1])) == "Size"


def test_gradients_are_told_tensor_by_tensor() -> None:
    a, b, c = torch.ones(2).requires_grad_(), torch.arange(2), torch.ones(1).requires_grad_()
    value = {"a": a, "rest": [b, 3, c]}
    (a.sum() * 2).backward()  # type: ignore[no-untyped-call]
    first, second, third = gradient_of(value)  # type: ignore[misc]
    assert torch.equal(first, torch.full((2,), 2.0))
    assert (second, third) == (None, None)
    assert gradient_of(a) is a.grad
    assert gradient_of(None) == ()
    assert [each is other for each, other in zip(tensors_in(value), (a, b, c), strict=True)] == [True] * 3


# What arrives is checked.


def described(structure: Any, tensors: int = 0, kind: str = "nested") -> Described:
    entries = wire_layouts(EXACT.pack([torch.ones(2)] * tensors).layout)
    return Described(kind, json.dumps(structure), tuple(entries))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (described(["set", None, []]), "'set'"),
        (described(["plain", [1], []]), "plain"),
        (described(["tuple", None, [["dense", None, []]]]), "1 tensors, but 0"),
        (described(["tuple", None, []], 1), "0 tensors, but 1"),
        (described(["dict", ["a"], []]), "dict"),
        (described(["named tuple", "posixpath:join", []]), r"'posixpath:join'"),
        (described(["named tuple", "builtins:eval", []]), r"'builtins:eval'"),
        (described(["registered", ["subprocess:Popen", None], []]), "subprocess:Popen"),
        (described({"tuple": 1}), "structure"),
        (described(None, kind="pickle"), "'pickle'"),
    ],
)
def test_a_structure_that_is_none_is_refused_on_receipt(layout: Described, message: str) -> None:
    header, description = encode_header((layout,))
    with pytest.raises(WorkerError, match=message):
        decode_header(header.tolist(), description)


def test_every_kind_has_a_name_of_its_own() -> None:
    assert [each.kind for each in CODECS] == ["dense", "nested"]
