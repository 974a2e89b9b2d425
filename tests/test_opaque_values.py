"""Values that cannot be sent, such as a model's output object: marked when they are measured, and never cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from builders import LOOPED, TRAINING, chain_profile, flat_cluster, plan_of
from in_threads import check_same_gradients, profile
from models import sgd
from penstock import Job, codec
from penstock.cluster import Cluster, local_cluster
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.planner.max_load import max_load_plan
from penstock.planner.pipedream import pipedream_plan
from penstock.planner.sparsepipe import sparsepipe_plan
from penstock.profile import Profile
from penstock.runtime.messages.values import obstacle


def with_opaque(found: Profile, *names: str) -> Profile:
    values = tuple(replace(v, opaque="Output" if v.name in names else "") for v in found.graph.values)
    return replace(found, graph=replace(found.graph, values=values))


CHAIN = with_opaque(chain_profile([1.0] * 6, value_bytes=1000, parameter_bytes=10**9), "v1", "v2", "v4")
"""layers 0, 1-2-3 and 4-5 may be apart"""


def check_uncut(plan: Plan) -> None:
    stage_of = plan.stage_of_layer
    assert stage_of[1] == stage_of[2] == stage_of[3]
    assert stage_of[4] == stage_of[5]


@pytest.mark.parametrize("devices", [2, 3, 4, 64])
@pytest.mark.parametrize("schedule", [*TRAINING, *LOOPED])
def test_no_schedule_cuts_where_a_value_cannot_be_sent(schedule: str, devices: int) -> None:
    check_uncut(make_plan(CHAIN, flat_cluster(devices), schedule=schedule))


@pytest.mark.parametrize("planner", [pipedream_plan, sparsepipe_plan, max_load_plan])
def test_neither_do_the_planners_for_comparison(planner: Callable[[Profile, Cluster], Plan]) -> None:
    plan = planner(CHAIN, flat_cluster(3))
    assert len(plan.stages) > 1
    check_uncut(plan)


def test_a_plan_that_does_is_refused_by_the_name_of_the_value_and_its_layers() -> None:
    with pytest.raises(PlanError, match=r"'v2' is a Output, .*stage 0 to 1; keep layers 'layer2' and 'layer3'"):
        plan_of(CHAIN, flat_cluster(2), [[0, 1, 2], [3, 4, 5]])


def test_a_profile_from_before_they_were_marked_still_loads() -> None:
    plain = chain_profile([1.0, 1.0])
    stored = codec.encode(plain)
    for value in stored["graph"]["values"]:
        del value["opaque"]
    assert codec.decode(Profile, stored) == plain
    assert codec.decode(Profile, codec.encode(CHAIN)) == CHAIN


def test_what_can_be_sent() -> None:
    assert obstacle(torch.zeros(2, dtype=torch.bool)) == ""
    assert obstacle(torch.zeros([1] * 9)) == "tensor of 9 dimensions"
    assert obstacle(torch.zeros(2, dtype=torch.float8_e4m3fn)) == "float8_e4m3fn tensor"
    assert obstacle(torch.eye(2).to_sparse()) == "sparse_coo tensor"
    assert obstacle((torch.zeros(2), None, 3)) == ""
    assert obstacle((torch.zeros(2), {4})) == "tuple that holds a set"


@dataclass
class Output:
    logits: Tensor


class Undecidable(nn.Module):
    """Neither export nor fx sees through it, so the model is one layer, and what it returns is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Output:
        return Output(self.linear(x) if float(x.detach().sum()) > 0 else self.linear(-x))


def make_job() -> Job:
    torch.manual_seed(0)
    data = [(x, x.flip(0)) for x in torch.randn(8, 4)]
    loss = lambda output, target: nn.functional.mse_loss(output.logits, target)  # noqa: E731
    return Job(model=Undecidable(), data=data, loss=loss, optimizer=sgd, batch_size=4)


def test_a_model_captured_whole_is_never_parted_from_its_loss() -> None:
    found = profile(make_job())
    assert found.front_end == "module"
    assert [value.opaque for value in found.graph.values] == ["Output"]
    plan = make_plan(found, local_cluster(2), schedule="1f1b")
    assert len(plan.stages) == 1
    check_same_gradients(plan, make_job)
