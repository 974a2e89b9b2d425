"""Small graphs, profiles, clusters and plans for tests, made by hand or drawn by hypothesis. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from penstock.cluster import Cluster, Device, Level
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.plan import Plan, Prediction, Stage
from penstock.profile import LayerSeconds, Profile, SizeCosts, WorkerSeconds
from penstock.schedule import FAMILIES, Pipeline, default_depth, family

SCHEDULES = tuple(name for name in FAMILIES if family(name).layout == "once")
TRAINING = tuple(name for name in SCHEDULES if family(name).trains)
SYNCHRONOUS = tuple(name for name in TRAINING if not family(name).asynchronous)
LOOPED = ("interleaved", "zb-v")
"""with several stages on a worker"""

_patient = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
law = settings(max_examples=50, **_patient)
"""For properties that are cheap to try."""
slow_law = settings(max_examples=25, **_patient)
"""For properties that plan or simulate."""
many_cases = settings(max_examples=600, phases=[Phase.explicit, Phase.generate], **_patient)
"""For a search against all there is. A case that fails is shown as it is: to shrink it takes minutes."""


def chain_graph(
    num_layers: int,
    *,
    value_bytes: int = 0,
    parameter_bytes: int = 0,
    saved_bytes: int = 0,
    tied: Sequence[int] = (),
) -> LayerGraph:
    """Layers one after another, each with one parameter; those in ``tied`` share theirs."""
    names = ["tied" if layer in tied else f"w{layer}" for layer in range(num_layers)]
    return LayerGraph(
        layers=tuple(
            Layer(id=i, name=f"layer{i}", kind="Linear", parameters=(names[i],), saved_bytes=saved_bytes)
            for i in range(num_layers)
        ),
        values=tuple(
            Value(name=f"v{i}", producer=i, consumers=(i + 1,), num_bytes=value_bytes) for i in range(num_layers - 1)
        ),
        parameters=tuple(Parameter(name=name, num_bytes=parameter_bytes) for name in dict.fromkeys(names)),
    )


def layer_seconds(forward_s: float, backward_s: float | None = None, update_s: float = 0.0) -> LayerSeconds:
    """A layer whose backward takes ``backward_s``, or as usual twice its forward, half of it for the weights."""
    half = forward_s if backward_s is None else backward_s / 2
    return LayerSeconds(forward_s=forward_s, backward_input_s=half, backward_weight_s=half, update_s=update_s)


def profile_of(
    graph: LayerGraph, seconds: Sequence[LayerSeconds], *, batch_size: int = 8, microbatch_size: int = 1
) -> Profile:
    return Profile(
        model="toy",
        front_end="module",
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        graph=graph,
        seconds={"cpu": tuple(seconds)},
    )


def chain_profile(
    forward_s: Sequence[float], *, batch_size: int = 8, microbatch_size: int = 1, **graph: Any
) -> Profile:
    """A chain of layers with these forward seconds and backwards of twice that; ``graph`` as for chain_graph."""
    seconds = [layer_seconds(each) for each in forward_s]
    return profile_of(
        chain_graph(len(seconds), **graph), seconds, batch_size=batch_size, microbatch_size=microbatch_size
    )


def affine_profile(
    fixed_s: float,
    sample_s: float,
    *,
    layers: int = 2,
    batch_size: int = 8,
    measured: Sequence[int] = (1, 8),
    **graph: Any,
) -> Profile:
    """A chain of layers with forwards of ``fixed_s`` and ``sample_s`` per sample, known at the ``measured`` sizes."""
    *others, largest = sorted(measured)
    profile = chain_profile(
        [fixed_s + largest * sample_s] * layers, batch_size=batch_size, microbatch_size=largest, **graph
    )
    values = [value.num_bytes for value in profile.graph.values]
    return replace(
        profile,
        other_sizes=tuple(
            SizeCosts(
                microbatch_size=size,
                seconds={"cpu": (layer_seconds(fixed_s + size * sample_s),) * layers},
                saved_bytes=tuple(layer.saved_bytes * size / largest for layer in profile.graph.layers),
                value_bytes=tuple(each * size / largest for each in values),
            )
            for size in others
        ),
    )


def flat_cluster(
    devices: int, *, bytes_per_s: float = 1e9, latency_s: float = 0.0, memory_bytes: int | None = None
) -> Cluster:
    return Cluster(
        name="flat",
        devices=(Device(memory_bytes=memory_bytes),) * devices,
        levels=(Level(size=devices, bytes_per_s=bytes_per_s, latency_s=latency_s),),
    )


def nothing_predicted() -> Prediction:
    return Prediction(seconds_per_minibatch=0.0, lower_bound_s=0.0, data_parallel_s=None, one_device_s=None)


def plan_of(
    profile: Profile,
    cluster: Cluster,
    layers: Sequence[Sequence[int]],
    replicas: Sequence[int] | None = None,
    *,
    schedule: str = "1f1b",
    microbatches: int = 1,
    shares: Sequence[Sequence[int]] = (),
) -> Plan:
    """A plan with these layers per stage, ``replicas`` of each on consecutive devices, and the usual depths."""
    replicas = replicas or [1] * len(layers)
    pipeline = pipeline_of(replicas, shares=shares)
    stages = tuple(
        Stage(
            layers=tuple(each),
            devices=pipeline.workers[i],
            in_flight=default_depth(pipeline, i),
            shares=pipeline.shares[i],
        )
        for i, each in enumerate(layers)
    )
    return Plan(
        profile=profile,
        cluster=cluster,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        prediction=nothing_predicted(),
    )


def one_device_plan(profile: Profile, *, schedule: str = "1f1b") -> Plan:
    return plan_of(profile, flat_cluster(1), [profile.graph.order], schedule=schedule)


def one_layer_per_stage(forward_s: Sequence[float], *, schedule: str, microbatches: int = 1, replicas: int = 1) -> Plan:
    """A chain with one stage per layer and nothing to send, so that links are free.

    ``forward_s`` is what each takes for a microbatch, which has two samples; a backward takes twice that.
    """
    profile = chain_profile(forward_s, batch_size=2 * microbatches, microbatch_size=2)
    stages = [[layer] for layer in range(len(forward_s))]
    counts = [replicas] * len(forward_s)
    return plan_of(profile, flat_cluster(sum(counts)), stages, counts, schedule=schedule, microbatches=microbatches)


def pipeline_of(
    replicas: Sequence[int],
    reads: Sequence[Sequence[int]] | None = None,
    ties: Sequence[Sequence[int]] = (),
    shares: Sequence[Sequence[int]] = (),
) -> Pipeline:
    """Stages of so many replicas, workers numbered stage by stage; each reads from the one before unless told."""
    workers, first = [], 0
    for count in replicas:
        workers.append(tuple(range(first, first + count)))
        first += count
    if reads is None:
        reads = [(stage - 1,) if stage else () for stage in range(len(replicas))]
    return Pipeline(
        workers=tuple(workers),
        reads=tuple(map(tuple, reads)),
        ties=tuple(map(tuple, ties)),
        shares=tuple(map(tuple, shares)),
    )


@st.composite
def replica_shares(draw: st.DrawFn, replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each stage, the shares of its replicas: mostly one each."""
    uneven = draw(st.sampled_from([False, False, True]))
    share = st.sampled_from([1, 1, 1, 2, 3]) if uneven else st.just(1)
    return [tuple(draw(share) for _ in range(count)) for count in replicas]


replications = st.lists(st.integers(1, 4), min_size=1, max_size=4)
minibatch_sizes = st.lists(st.integers(1, 13), min_size=1, max_size=3)
"""Microbatches of each minibatch: fewer than stages, and numbers that no replication divides, among them."""


@st.composite
def pipelines(draw: st.DrawFn, *, skips: bool = True, ties: bool = False) -> Pipeline:
    """Any replication and shares; ``skips``: a stage may read several earlier ones; ``ties``: stages share weights."""
    replicas = draw(replications)
    stages = len(replicas)
    reads: list[tuple[int, ...]] = [()]
    for stage in range(1, stages):
        earlier = draw(st.sets(st.integers(0, stage - 1), max_size=3)) if skips else set()
        reads.append(tuple(sorted(earlier | {stage - 1})))
    tied: list[tuple[int, ...]] = []
    if ties and stages > 1:
        groups = st.sets(st.integers(0, stages - 1), min_size=2, max_size=stages)
        tied = [tuple(sorted(group)) for group in draw(st.lists(groups, max_size=2))]
    return pipeline_of(replicas, reads, tied, draw(replica_shares(replicas)))


@st.composite
def graphs(draw: st.DrawFn, *, max_layers: int = 6, ties: bool = True) -> LayerGraph:
    """A DAG with ids in any order, values with several readers, several inputs, tied and missing parameters.

    Everything leads to the last layer, as it does to the loss of a model.
    """
    n = draw(st.integers(1, max_layers))
    ids = draw(st.permutations(range(n)))
    readers = [draw(st.sets(st.integers(i + 1, n - 1), min_size=1, max_size=3)) for i in range(n - 1)] + [set()]
    sizes = st.integers(0, 10**6)
    weights = st.integers(0, 10**7)  # some of more than a bucket
    parameters = tuple(
        Parameter(name=f"w{i}", num_bytes=draw(weights), state_bytes=draw(sizes))
        for i in range(draw(st.integers(0, n)))
    )
    some_names = st.sets(st.sampled_from([p.name for p in parameters]), max_size=2) if parameters else st.just(set())

    def names_of(layer: int) -> st.SearchStrategy[set[str]]:
        return some_names if ties else st.just({f"w{layer}"} if layer < len(parameters) else set())

    return LayerGraph(
        layers=tuple(
            Layer(
                id=ids[i],
                name=f"l{i}",
                kind="Any",
                parameters=tuple(sorted(draw(names_of(i)))),
                saved_bytes=draw(sizes),
                reads_data=draw(st.booleans()),
            )
            for i in range(n)
        ),
        values=tuple(
            Value(
                name=f"v{i}",
                producer=ids[i],
                consumers=tuple(ids[reader] for reader in sorted(readers[i])),
                num_bytes=draw(sizes),
                differentiable=draw(st.booleans()),
            )
            for i in range(n)
        ),
        parameters=parameters,
    )


def downsets_of(graph: LayerGraph) -> list[frozenset[int]]:
    """All of them, smaller ones first, by trying every set of layers."""
    before = {layer.id: {v.producer for v in graph.values if layer.id in v.consumers} for layer in graph.layers}
    sets = itertools.chain.from_iterable(itertools.combinations(before, n) for n in range(len(before) + 1))
    return [frozenset(s) for s in sets if all(before[layer] <= set(s) for layer in s)]


def chains_of(
    graph: LayerGraph, cuts: int, before: frozenset[int] = frozenset(), after: frozenset[int] | None = None
) -> list[list[frozenset[int]]]:
    """Every way to cut what lies between two downsets, all by default, so many times: downsets, both ends included."""
    after = frozenset(graph.by_id) if after is None else after
    between = [downset for downset in downsets_of(graph) if before < downset < after]
    chains = ([before, *chosen, after] for chosen in itertools.combinations(between, cuts))
    return [chain for chain in chains if all(smaller < larger for smaller, larger in itertools.pairwise(chain))]


_seconds = st.floats(1e-6, 0.1, allow_nan=False)
_costs = st.builds(
    LayerSeconds, forward_s=_seconds, backward_input_s=_seconds, backward_weight_s=_seconds, update_s=_seconds
)
_own_costs = st.builds(
    LayerSeconds,
    forward_s=_seconds,
    backward_input_s=_seconds,
    backward_weight_s=_seconds,
    halving_s=_seconds,
    apart_s=_seconds,
    update_s=_seconds,
    copy_s=_seconds,
    average_s=_seconds,
)
_own = st.floats(0, 0.02, allow_nan=False)
_workers = st.builds(
    WorkerSeconds,
    forward_s=_own,
    backward_s=_own,
    backward_input_s=_own,
    backward_weight_s=_own,
    update_s=_own,
    copy_s=_own,
    average_s=_own,
    between_s=_own,
)


@st.composite
def profiles(
    draw: st.DrawFn,
    *,
    max_layers: int = 6,
    kinds: Sequence[str] = ("cpu",),
    ties: bool = True,
    one_size: bool = False,
) -> Profile:
    """Of layers alone, or also with workers' own time and loading; measured at up to three microbatch sizes."""
    graph = draw(graphs(max_layers=max_layers, ties=ties))
    own = draw(st.booleans())
    rows = st.lists(_own_costs if own else _costs, min_size=len(graph.layers), max_size=len(graph.layers)).map(tuple)
    profile = Profile(
        model="random",
        front_end="module",
        batch_size=draw(st.integers(1, 32)),
        microbatch_size=draw(st.integers(1, 8)),
        graph=graph,
        seconds={kind: draw(rows) for kind in kinds},
        load_s=draw(_own) if own else 0.0,
        worker={kind: draw(_workers) for kind in kinds[: draw(st.integers(0, len(kinds)))]} if own else {},
    )
    sizes = st.sets(
        st.integers(1, 8).filter(lambda size: size != profile.microbatch_size), max_size=0 if one_size else 2
    )
    return replace(profile, other_sizes=tuple(draw(_at_size(profile, size)) for size in sorted(draw(sizes))))


@st.composite
def _at_size(draw: st.DrawFn, profile: Profile, microbatch_size: int) -> SizeCosts:
    """Costs of another size: of any shape, but an update takes as long as at any other size."""

    def row(known: LayerSeconds) -> LayerSeconds:
        forward_s, input_s, weight_s = (draw(_seconds) for _ in range(3))
        return replace(known, forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s)

    sizes = st.integers(0, 10**6)
    return SizeCosts(
        microbatch_size=microbatch_size,
        seconds={kind: tuple(map(row, rows)) for kind, rows in profile.seconds.items()},
        saved_bytes=tuple(draw(sizes) for _ in profile.graph.layers),
        value_bytes=tuple(draw(sizes) for _ in profile.graph.values),
        load_s=draw(_own),
    )


@st.composite
def clusters(
    draw: st.DrawFn,
    *,
    max_devices: int = 6,
    even: bool = False,
    kinds: Sequence[str] = ("any",),
    memory_bytes: st.SearchStrategy[int | None] | None = None,
) -> Cluster:
    """One or two levels, devices alike or of up to three different makes."""
    inner = draw(st.integers(1, max_devices))
    outer = draw(st.integers(1, max(1, max_devices // inner)))
    rates = st.floats(1e5, 1e11)
    levels = tuple(
        Level(
            size=size,
            bytes_per_s=draw(rates),
            latency_s=draw(st.floats(0, 1e-3)),
            ring_bytes_per_s=draw(st.none() | rates),
            ring_by_workers=draw(st.booleans()),
        )
        for size in (inner, outer)
    )
    make = st.builds(
        Device,
        kind=st.sampled_from(kinds),
        speed=st.just(1.0) if even else st.floats(0.25, 4.0),
        memory_bytes=st.none() if memory_bytes is None else memory_bytes,
    )
    makes = draw(st.lists(make, min_size=1, max_size=1 if even else 3))
    devices = tuple(draw(st.sampled_from(makes)) for _ in range(inner * outer))
    handling_s, copying = draw(st.sampled_from([(0.0, None), (1e-3, None), (1e-3, 1e6)]))
    return Cluster(name="random", devices=devices, levels=levels, handling_s=handling_s, copying_bytes_per_s=copying)


@st.composite
def plans(draw: st.DrawFn, *, schedules: Sequence[str] = SCHEDULES) -> Plan:
    """Any cut of any graph over any devices: not a good plan, but one that can run."""
    profile, cluster = draw(profiles()), draw(clusters())
    order, devices = profile.graph.order, len(cluster.devices)
    schedule = draw(st.sampled_from(schedules))
    tied = len({name for each in profile.graph.layers for name in each.parameters}) < sum(
        len(each.parameters) for each in profile.graph.layers
    )
    most = 1 if family(schedule).asynchronous and tied else min(len(order), devices)
    count = draw(st.integers(1, most))
    cuts = sorted(draw(st.permutations(range(1, len(order))))[: count - 1])
    layers = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    replicas = [1] * count
    for _ in range(draw(st.integers(0, devices - count))):
        replicas[draw(st.integers(0, count - 1))] += 1
    microbatches = draw(st.integers(1, profile.batch_size)) if family(schedule).accumulates else 1
    shares = draw(replica_shares(replicas))
    if max(map(sum, shares)) > family(schedule).widest_round(microbatches):
        schedule, microbatches = "pipedream", 1
    return plan_of(profile, cluster, layers, replicas, schedule=schedule, microbatches=microbatches, shares=shares)
