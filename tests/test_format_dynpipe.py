"""DynPipe's partitions and layer profiles."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from builders import flat_cluster, plan_of
from format_files import (
    layer_costs,
    node,
    parse,
    plan_of_three_stages,
)
from penstock.cost import CostModel, message
from penstock.errors import FormatError, PlanError
from penstock.formats import (
    Partition,
    parse_partition,
    partition_of,
    partition_text,
)


def test_a_plans_partition_counts_its_layers() -> None:
    partition = partition_of(plan_of_three_stages())
    assert partition == Partition(partition=(2, 3, 1), recompute_ratio=(0.0,) * 3, batch_size=(8, 8, 8))
    assert parse_partition(partition_text(partition), "p.json") == partition


def test_a_stage_that_recomputes_does_so_wholly_in_its_partition() -> None:
    plan = plan_of_three_stages()
    recomputing = replace(plan, stages=(replace(plan.stages[0], recompute=True), *plan.stages[1:]))
    assert partition_of(recomputing).recompute_ratio == (1.0, 0.0, 0.0)


def test_a_plan_that_is_no_chain_of_layers_has_no_partition() -> None:
    profile, _ = parse("\n".join(node(f"node{i}", "X", 1, 1, 1, 0) for i in range(4)))
    with pytest.raises(PlanError, match="node1 of stage 0 comes after layers of stage 1"):
        partition_of(plan_of(profile, flat_cluster(2), [[1, 3], [0, 2]]))


BAD_PARTITIONS = {
    "empty": ({"partition": []}, "partition: empty"),
    "a stage of none": ({"partition": [0, 1]}, "partition[0]: 0"),
    "too few": ({"batch_size": [1]}, "batch_size: 1 entries for 2 stages"),
    "no share": ({"recompute_ratio": [0, 2]}, "recompute_ratio[1]: 2.0 is no share"),
    "an unknown key": ({"partitions": [1]}, "partitions: unknown field"),
    "text": ({"partition": ["a", 1]}, "partition[0]: expected a whole number"),
}


@pytest.mark.parametrize("name", BAD_PARTITIONS)
def test_a_damaged_partition_is_refused_with_its_field(name: str) -> None:
    change, words = BAD_PARTITIONS[name]
    good = {"partition": [2, 3], "recompute_ratio": [0, 0.5], "batch_size": [4, 4]}
    with pytest.raises(FormatError, match=re.escape(f"p.json: {words}")):
        parse_partition(json.dumps(good | change), "p.json")


def test_layer_profiles_become_a_chain_whose_link_gives_the_seconds_back() -> None:
    profile = layer_costs()
    assert [row.forward_s for row in profile.seconds_on("any")] == [0.001, 0.002, 0.003]
    assert [row.backward_input_s for row in profile.seconds_on("any")] == [0.002, 0.004, 0.0065]
    costs = CostModel(profile=profile, cluster=flat_cluster(2, bytes_per_s=1e6), microbatch_size=1)
    assert message(costs.forward_bytes([0], [1])).seconds(costs.cluster.link(0, 1)) == 0.5


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"forward": ""}, "forward.txt: empty"),
        ({"backward": "1\n2\n"}, "backward.txt: 2 numbers for 3 layers"),
        ({"sent": "1\n"}, "communication.txt: 1 numbers for 3 layers"),
        ({"sent": "1\n\nx\n"}, "communication.txt:3: expected a number"),
        ({"sent": "1\n1e14\n"}, "communication.txt: number 2"),
        ({"forward": "1\n-2\n3\n"}, "forward.txt:2: -0.002 is no time"),
    ],
)
def test_damaged_layer_profiles_are_refused(files: dict[str, str], words: str) -> None:
    with pytest.raises(FormatError, match=re.escape(words)):
        layer_costs(**files)
