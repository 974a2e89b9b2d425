"""What follows from a plan's stages: the values between them, and the workers that hold each parameter."""

from __future__ import annotations

from dataclasses import replace

from builders import chain_profile, flat_cluster, plan_of
from penstock.graph import Value
from penstock.plan import Plan

SKIP = Value(name="skip", producer=0, consumers=(1, 2), num_bytes=7)


def with_skip(*, first_kind: str = "Any") -> Plan:
    """Three layers in three stages, the first of which the last reads too."""
    profile = chain_profile([1.0] * 3, value_bytes=5)
    first, *others = profile.graph.layers
    graph = replace(
        profile.graph, layers=(replace(first, kind=first_kind), *others), values=(*profile.graph.values, SKIP)
    )
    return plan_of(replace(profile, graph=graph), flat_cluster(3), [[0], [1], [2]], schedule="pipedream")


def test_an_edge_has_the_values_that_its_second_stage_reads_from_its_first() -> None:
    edges = with_skip().edges
    assert {edge: [value.name for value in values] for edge, values in edges.items()} == {
        (0, 1): ["v0", "skip"],
        (0, 2): ["skip"],
        (1, 2): ["v1"],
    }


def test_model_inputs_make_an_edge_without_values() -> None:
    plan = with_skip(first_kind="Input0")
    assert plan.edges[0, 1] == plan.edges[0, 2] == ()
    assert plan.pipeline.reads == ((), (0,), (0, 1))


def test_a_parameter_is_owned_by_all_replicas_of_all_stages_that_use_it() -> None:
    profile = chain_profile([1.0] * 3, parameter_bytes=4, tied=(0, 2))
    plan = plan_of(profile, flat_cluster(4), [[0], [1], [2]], [1, 2, 1], schedule="1f1b", microbatches=4)
    assert plan.stages_of_parameters == {"tied": (0, 2), "w1": (1,)}
    assert plan.owners_of_parameters == {"tied": (0, 3), "w1": (1, 2)}
    assert plan.pipeline.ties == ((0, 2),)
