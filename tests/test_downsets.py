"""Cuts: the downsets of a graph, all of them or the ones worth having."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from builders import graphs, law
from penstock.graph import Layer, LayerGraph, Value
from penstock.planner.downsets import Downsets, find_downsets


def all_downsets(graph: LayerGraph) -> set[frozenset[int]]:
    """By trying every set of layers."""
    before = {layer.id: {v.producer for v in graph.values if layer.id in v.consumers} for layer in graph.layers}
    sets = itertools.chain.from_iterable(itertools.combinations(before, n) for n in range(len(before) + 1))
    return {frozenset(s) for s in sets if all(before[layer] <= set(s) for layer in s)}


def as_sets(downsets: Downsets) -> list[frozenset[int]]:
    return [frozenset(np.array(downsets.graph.order)[row].tolist()) for row in downsets.members]


@law
@given(graphs())
def test_all_downsets_are_found_each_once_smaller_before_larger(graph: LayerGraph) -> None:
    downsets = find_downsets(graph, {layer.id: 1.0 for layer in graph.layers})
    found = as_sets(downsets)
    assert downsets.complete
    assert len(found) == len(set(found))
    assert set(found) == all_downsets(graph)
    for i, j in itertools.combinations(range(len(found)), 2):
        assert not found[j] < found[i]
        assert downsets.contained[i, j] == (found[i] < found[j])


@law
@given(graphs())
def test_bytes_that_cross_a_cut_count_each_value_once(graph: LayerGraph) -> None:
    downsets = find_downsets(graph, {layer.id: 1.0 for layer in graph.layers})
    everything = set(graph.order)
    for inside, num_bytes in zip(as_sets(downsets), downsets.crossing_bytes(), strict=True):
        assert num_bytes == sum(value.num_bytes for value in graph.crossing(inside, everything - inside))


def ladder(branches: int, length: int, modules: int) -> LayerGraph:
    """Modules one after another, each of so many branches of so many layers between a fork and a join."""
    layers, values = [Layer(id=0, name="start", kind="Any")], []
    last = 0

    def add(name: str, sources: list[int]) -> int:
        layers.append(Layer(id=len(layers), name=name, kind="Any"))
        for source in sources:
            values.append((source, layers[-1].id))
        return layers[-1].id

    for module in range(modules):
        ends = []
        for branch in range(branches):
            at = last
            for place in range(length):
                at = add(f"m{module}b{branch}l{place}", [at])
            ends.append(at)
        last = add(f"join{module}", ends)
    consumers: dict[int, list[int]] = {}
    for source, target in values:
        consumers.setdefault(source, []).append(target)
    made = tuple(Value(name=f"v{s}", producer=s, consumers=tuple(t), num_bytes=1) for s, t in consumers.items())
    return LayerGraph(layers=tuple(layers), values=made)


@pytest.mark.parametrize(("branches", "length", "modules"), [(4, 8, 10), (12, 3, 2), (30, 1, 1)])
def test_too_many_cuts_are_thinned_out_and_stay_cuts(branches: int, length: int, modules: int) -> None:
    graph = ladder(branches, length, modules)
    downsets = find_downsets(graph, {layer.id: 1.0 for layer in graph.layers}, most=500)
    assert not downsets.complete
    assert 2 < len(downsets) <= 500
    assert not downsets.members[0].any()
    assert downsets.members[-1].all()
    before = {layer.id: {v.producer for v in graph.values if layer.id in v.consumers} for layer in graph.layers}
    for inside in as_sets(downsets):
        assert all(before[layer] <= inside for layer in inside)


def test_a_free_layer_that_nobody_reads_makes_no_cut_of_its_own() -> None:
    layers = tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(4))
    values = (
        Value(name="a", producer=0, consumers=(1, 2), num_bytes=1),
        Value(name="b", producer=1, consumers=(3,), num_bytes=1),
    )
    weights = {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}
    assert as_sets(find_downsets(LayerGraph(layers=layers, values=values), weights)) == [
        frozenset(), frozenset({0, 2}), frozenset({0, 1, 2}), frozenset({0, 1, 2, 3}),
    ]  # fmt: skip


def test_model_inputs_come_with_the_first_stage_and_cost_no_transfer() -> None:
    layers = (
        Layer(id=0, name="x", kind="Input0"),
        Layer(id=1, name="a", kind="Any"),
        Layer(id=2, name="b", kind="Any"),
    )
    values = (
        Value(name="x", producer=0, consumers=(1, 2), num_bytes=100),
        Value(name="a", producer=1, consumers=(2,), num_bytes=7),
    )
    downsets = find_downsets(LayerGraph(layers=layers, values=values), {0: 0.0, 1: 1.0, 2: 1.0})
    assert as_sets(downsets) == [frozenset(), frozenset({0, 1}), frozenset({0, 1, 2})]
    assert downsets.crossing_bytes().tolist() == [0, 7, 0]
