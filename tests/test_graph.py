from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_graph, graphs, law
from penstock.errors import GraphError
from penstock.graph import Layer, LayerGraph, Parameter, Value, by_edge


@law
@given(graphs(max_layers=8))
def test_order_holds_every_layer_once_and_producers_before_consumers(graph: LayerGraph) -> None:
    assert sorted(graph.order) == sorted(graph.by_id)
    place = {layer: i for i, layer in enumerate(graph.order)}
    for value in graph.values:
        assert all(place[value.producer] < place[consumer] for consumer in value.consumers)


@law
@given(graphs(max_layers=8))
def test_order_takes_the_smallest_ready_layer_first(graph: LayerGraph) -> None:
    needs = {layer: {v.producer for v in graph.values if layer in v.consumers} for layer in graph.by_id}
    for i, layer in enumerate(graph.order):
        done = set(graph.order[:i])
        assert layer == min(each for each in needs if each not in done and needs[each] <= done)


@law
@given(graphs(max_layers=8), st.data())
def test_order_does_not_depend_on_how_layers_and_values_are_listed(graph: LayerGraph, data: st.DataObject) -> None:
    shuffled = LayerGraph(
        layers=tuple(data.draw(st.permutations(graph.layers))),
        values=tuple(data.draw(st.permutations(graph.values))),
        parameters=graph.parameters,
    )
    assert shuffled.order == graph.order


@law
@given(graphs(max_layers=8), st.data())
def test_what_crosses_a_cut_is_each_value_once_and_only_what_is_read_beyond_it(
    graph: LayerGraph, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(graph.order)))
    before, after = set(graph.order[:at]), set(graph.order[at:])
    crossing = graph.crossing(before, after)
    assert len({value.name for value in crossing}) == len(crossing)
    read_beyond = {v.name for v in graph.values if v.producer in before and set(v.consumers) & after}
    assert {value.name for value in crossing} == read_beyond
    assert graph.crossing(after, before) == ()


def test_a_value_with_many_readers_crosses_once() -> None:
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(5)),
        values=(Value(name="shared", producer=0, consumers=(1, 2, 3, 4), num_bytes=100),),
    )
    assert [v.name for v in graph.crossing({0, 1}, {2, 3, 4})] == ["shared"]
    assert graph.crossing({1}, {2, 3, 4}) == ()


def test_an_edge_has_each_value_once_in_the_given_order() -> None:
    made = [("x", 0, (1, 2, 3)), ("y", 1, (3,)), ("z", 0, (0, 3))]
    assert by_edge(made, {0: 0, 1: 0, 2: 1, 3: 1}) == {(0, 1): ["x", "y", "z"]}
    assert by_edge(made, {0: 0, 1: 1, 2: 2, 3: 2}) == {(0, 1): ["x"], (0, 2): ["x", "z"], (1, 2): ["y"]}


def test_tied_parameters_are_counted_once() -> None:
    graph = chain_graph(4, parameter_bytes=10, tied=(0, 3))
    assert [p.name for p in graph.parameters_of(range(4))] == ["tied", "w1", "w2"]
    assert sum(p.num_bytes for p in graph.parameters_of([0, 3])) == 10
    assert [p.name for p in graph.parameters_of([3])] == ["tied"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Parameter(name="w", num_bytes=-1),
        lambda: Parameter(name="w", num_bytes=1, state_bytes=-1),
        lambda: Layer(id=0, name="l", kind="Any", saved_bytes=-1),
        lambda: Value(name="v", producer=0, consumers=(), num_bytes=-1),
    ],
)
def test_negative_sizes_are_refused(make: object) -> None:
    with pytest.raises(GraphError, match="is -1; sizes are 0 or more"):
        make()  # type: ignore[operator]


def test_a_cycle_names_the_layers_on_it() -> None:
    layers = tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(3))
    back = (
        Value(name="a", producer=1, consumers=(2,), num_bytes=1),
        Value(name="b", producer=2, consumers=(1,), num_bytes=1),
    )
    with pytest.raises(GraphError, match=r"1 \(l1\), 2 \(l2\) lie on a cycle"):
        LayerGraph(layers=layers, values=back)
