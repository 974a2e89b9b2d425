"""The searches against every plan there is, and laws that the best plan obeys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from builders import chain_profile, clusters, flat_cluster, many_cases, profiles, slow_law
from exhaustive import best_s, seconds
from penstock.cluster import Cluster, Device, Level
from penstock.errors import PenstockError
from penstock.graph import LayerGraph
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.planner.explore import Explorer
from penstock.planner.request import Request
from penstock.planner.threshold import ThresholdSearch
from penstock.profile import LayerSeconds, Profile

pytestmark = pytest.mark.timeout(600)  # hundreds of exhaustive searches each

KINDS = ("fast", "slow")
SYNCHRONOUS = ("1f1b", "gpipe")
little = st.sampled_from([None, 3 * 10**5, 10**6, 3 * 10**6, 10**7])
small_profiles = profiles(max_layers=4, kinds=KINDS)
untied_profiles = profiles(max_layers=4, kinds=KINDS, ties=False)
"""What a weight costs that stages share is counted after the search, which cannot see both of them."""


def request(profile: Profile, cluster: Cluster, schedule: str = "pipedream", **options: object) -> Request:
    microbatches = options.pop("microbatches", 1)
    hints = options.pop("hints", Hints())
    return Request(profile, cluster, schedule, microbatches, hints, **options)  # type: ignore[arg-type]


def found_s(asked: Request) -> float:
    """In little memory it may be less than the exhaustive search's, which knows no plan with less in flight than keeps
    every stage busy."""
    return min((seconds(asked, plan) for plan in asked.candidates), default=math.inf)


@many_cases
@given(small_profiles, clusters(max_devices=4, kinds=KINDS))
def test_asynchronous_plans_equal_exhaustive_search(profile: Profile, cluster: Cluster) -> None:
    asked = request(profile, cluster)
    assert found_s(asked) == pytest.approx(best_s(asked), rel=1e-6)


@many_cases
@given(small_profiles, clusters(max_devices=4, kinds=KINDS, memory_bytes=little), st.booleans())
def test_plans_in_little_memory_are_no_worse_than_exhaustive_search(
    profile: Profile, cluster: Cluster, recompute: bool
) -> None:
    asked = request(profile, cluster, recompute=recompute)
    assert found_s(asked) <= best_s(asked) * (1 + 1e-6)


@many_cases
@given(
    untied_profiles, clusters(max_devices=4, kinds=KINDS, memory_bytes=little), st.sampled_from(SYNCHRONOUS), st.data()
)
def test_synchronous_plans_are_no_worse_than_exhaustive_search(
    profile: Profile, cluster: Cluster, schedule: str, data: st.DataObject
) -> None:
    microbatches = data.draw(st.integers(1, min(4, profile.batch_size)))
    asked = request(profile, cluster, schedule, microbatches=microbatches)
    assert found_s(asked) <= best_s(asked) * (1 + 1e-6)


@many_cases
@given(small_profiles, clusters(max_devices=4, kinds=KINDS, memory_bytes=little), st.floats(1.0, 1e4))
def test_inference_plans_equal_exhaustive_search(profile: Profile, cluster: Cluster, samples_per_s: float) -> None:
    asked = request(profile, cluster, "inference", samples_per_s=samples_per_s)
    assert found_s(asked) == pytest.approx(best_s(asked), rel=1e-6)


@st.composite
def hints(draw: st.DrawFn, layers: int) -> Hints:
    names = st.integers(0, layers - 1).map(lambda i: f"l{i}")
    return Hints(
        **draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "pins": st.tuples(st.tuples(names, st.integers(0, 2))),
                    "together": st.tuples(st.tuples(names, names)),
                    "most_stages": st.integers(1, 3),
                    "straight": st.booleans(),
                },
            )
        )
    )


@many_cases
@given(
    untied_profiles,
    clusters(max_devices=4, kinds=KINDS, memory_bytes=little),
    st.sampled_from(("pipedream", *SYNCHRONOUS)),
    st.data(),
)
def test_plans_with_hints_are_no_worse_than_exhaustive_search(
    profile: Profile, cluster: Cluster, schedule: str, data: st.DataObject
) -> None:
    given_hints = data.draw(
        hints(len(profile.graph.layers))
        | st.lists(st.integers(1, 2), min_size=1, max_size=3).map(lambda counts: Hints(replicas=tuple(counts)))
    )
    asked = request(profile, cluster, schedule, hints=given_hints)
    assert found_s(asked) <= best_s(asked) * (1 + 1e-6)


@slow_law
@given(
    profiles(max_layers=6), clusters(max_devices=6, even=True), st.sampled_from(("pipedream", "1f1b")), st.booleans()
)
def test_counting_devices_finds_what_placing_them_does(
    profile: Profile, cluster: Cluster, schedule: str, straight: bool
) -> None:
    """The search for very many devices, on few. In order it may miss a placement, never invent one."""
    asked = request(profile, cluster, schedule, hints=Hints(straight=straight))
    placed = Explorer(asked.stage_costs, asked.hints).tightest()[0].value_s
    counted, bound_s = ThresholdSearch(stage_costs=asked.stage_costs, straight=straight).tightest(0.0)
    assert counted[0].value_s >= placed * (1 - 1e-6)
    if len({level.bytes_per_s for level in cluster.levels if level.size > 1}) <= 1:
        assert counted[0].value_s <= placed * 1.003
        assert bound_s <= placed * (1 + 1e-6)


@pytest.mark.parametrize("latency_s", [0.0, 1e-250, 1e-12, 1e-6])
def test_counting_devices_is_not_confused_by_next_to_no_latency(latency_s: float) -> None:
    profile = chain_profile([0.2, 0.2, 0.25, 0.2, 0.2], batch_size=1, parameter_bytes=1)
    cluster = flat_cluster(2, bytes_per_s=1e5, latency_s=latency_s)
    asked = request(profile, cluster, "1f1b")
    placed = Explorer(asked.stage_costs, asked.hints).tightest()[0].value_s
    counted, _ = ThresholdSearch(stage_costs=asked.stage_costs).tightest(0.0)
    assert counted[0].value_s == pytest.approx(placed, rel=3e-3)


def relabelled(profile: Profile, names: list[int]) -> Profile:
    graph, new = profile.graph, dict(zip([layer.id for layer in profile.graph.layers], names, strict=True))
    order = sorted(range(len(names)), key=lambda i: names[i])
    changed = LayerGraph(
        layers=tuple(replace(graph.layers[i], id=names[i]) for i in order),
        values=tuple(
            replace(v, producer=new[v.producer], consumers=tuple(new[c] for c in v.consumers)) for v in graph.values
        ),
        parameters=graph.parameters,
    )

    def reordered(seconds_of: Mapping[str, tuple[LayerSeconds, ...]]) -> dict[str, tuple[LayerSeconds, ...]]:
        return {kind: tuple(rows[i] for i in order) for kind, rows in seconds_of.items()}

    others = tuple(
        replace(size, seconds=reordered(size.seconds), saved_bytes=tuple(size.saved_bytes[i] for i in order))
        for size in profile.other_sizes
    )
    return replace(profile, graph=changed, seconds=reordered(profile.seconds), other_sizes=others)


@slow_law
@given(profiles(ties=False), clusters(), st.sampled_from(("pipedream", "1f1b")), st.data())
def test_names_of_layers_and_order_of_devices_do_not_change_the_objective(
    profile: Profile, cluster: Cluster, schedule: str, data: st.DataObject
) -> None:
    names = data.draw(st.permutations(range(10, 10 + len(profile.graph.layers))))
    devices = tuple(data.draw(st.permutations(cluster.devices))) if _is_flat(cluster) else cluster.devices
    other = request(relabelled(profile, list(names)), replace(cluster, devices=devices), schedule)
    assert found_s(other) == pytest.approx(found_s(request(profile, cluster, schedule)), rel=1e-6)


def _is_flat(cluster: Cluster) -> bool:
    return sum(level.size > 1 for level in cluster.levels) <= 1


@slow_law
@given(
    profiles(ties=False), clusters(max_devices=5), st.sampled_from(("pipedream", *SYNCHRONOUS)), st.floats(0.25, 4.0)
)
def test_one_more_device_never_makes_a_plan_worse(
    profile: Profile, cluster: Cluster, schedule: str, speed: float
) -> None:
    assume(_is_flat(cluster))
    link = next((level for level in cluster.levels if level.size > 1), cluster.levels[0])
    devices = cluster.devices
    small = Cluster(name="small", devices=devices, levels=(replace(link, size=len(devices)),))
    more = Cluster(name="more", devices=(*devices, Device(speed=speed)), levels=(replace(link, size=len(devices) + 1),))
    assert found_s(request(profile, more, schedule)) <= found_s(request(profile, small, schedule)) * (1 + 1e-9)


@slow_law
@given(profiles(ties=False), clusters(), st.sampled_from(("pipedream", *SYNCHRONOUS)), st.floats(1.0, 100.0))
def test_more_bandwidth_never_makes_a_plan_worse(
    profile: Profile, cluster: Cluster, schedule: str, times: float
) -> None:
    levels = tuple(replace(level, bytes_per_s=level.bytes_per_s * times) for level in cluster.levels)
    faster = request(profile, replace(cluster, levels=levels), schedule)
    assert found_s(faster) <= found_s(request(profile, cluster, schedule)) * (1 + 1e-9)


@slow_law
@given(profiles(), clusters(), st.floats(1.0, 100.0))
def test_more_bandwidth_never_makes_an_asynchronous_prediction_worse(
    profile: Profile, cluster: Cluster, times: float
) -> None:
    levels = tuple(replace(level, bytes_per_s=level.bytes_per_s * times) for level in cluster.levels)
    before = make_plan(profile, cluster).prediction.seconds_per_minibatch
    after = make_plan(profile, replace(cluster, levels=levels)).prediction.seconds_per_minibatch
    assert after <= before * 1.02  # where the simulator does not quite confirm the cost model


def test_an_exact_search_proves_its_plan_the_best() -> None:
    profile = chain_profile([2.0, 1.0, 5.0], batch_size=1, value_bytes=10**6, parameter_bytes=10**9)
    plan = make_plan(profile, flat_cluster(3, bytes_per_s=1e6))
    assert plan.prediction.gap == pytest.approx(0.0, abs=1e-9)


# Unequal devices


def unequal(*speeds: float, bytes_per_s: float = 1e12) -> Cluster:
    devices = tuple(Device(speed=speed) for speed in speeds)
    return Cluster(name="unequal", devices=devices, levels=(Level(size=len(speeds), bytes_per_s=bytes_per_s),))


def test_a_mixed_stage_shares_its_microbatches_in_proportion_to_speed() -> None:
    plan = make_plan(chain_profile([1.0], batch_size=1), unequal(1.0, 3.0))
    assert [(stage.devices, stage.shares) for stage in plan.stages] == [((0, 1), (1, 3))]
    assert plan.prediction.seconds_per_minibatch == pytest.approx(3.0 / 4, rel=0.03)


def test_any_order_of_devices_is_tried() -> None:
    """The heavy layer goes to the fast device, which stands first, and the light one behind it to the slow."""
    profile = chain_profile([1.0, 4.0], batch_size=1, parameter_bytes=10**12)
    plan = make_plan(profile, unequal(4.0, 1.0, bytes_per_s=1e9))
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]


def test_a_slow_device_that_does_not_help_stays_idle() -> None:
    profile = chain_profile([1.0], batch_size=1, parameter_bytes=10**9)
    assert make_plan(profile, unequal(1.0, 0.01, bytes_per_s=1e6)).devices == (0,)


# Hints


def stages_of(plan: Plan) -> list[tuple[int, ...]]:
    return [stage.layers for stage in plan.stages]


def test_hints_are_kept() -> None:
    profile = chain_profile([1.0] * 6, batch_size=1, parameter_bytes=10**6)
    cluster = flat_cluster(4)

    def plan(**asked: object) -> Plan:
        return make_plan(profile, cluster, hints=Hints(**asked))  # type: ignore[arg-type]

    assert [len(stage.devices) for stage in plan(replicas=(3, 1)).stages] == [3, 1]
    assert plan(pins=(("layer4", 2),)).stage_of_layer[4] == 2
    assert all(len(stage.devices) == 1 for stage in plan(straight=True).stages)
    assert len(plan(straight=True, most_stages=2).stages) <= 2
    joined = plan(straight=True, together=(("layer1", "layer4"),)).stage_of_layer
    assert joined[1] == joined[4]


def test_hints_that_contradict_each_other_or_the_model_are_refused() -> None:
    profile, cluster = chain_profile([1.0] * 3, batch_size=1), flat_cluster(2)
    cases = [
        ({"replicas": (2, 1)}, "no plan for toy on flat keeps to --replicas 2-1; drop or change it"),
        ({"pins": (("layer0", 1),), "straight": True}, "keeps to --pin layer0=1; drop or change it"),
        (
            {"pins": (("layer2", 1),), "most_stages": 1},
            "keeps to --pin layer2=1 and --most-stages 1; drop or change one of them",
        ),
        (
            {"pins": (("layer0", 1), ("layer1", 2))},
            "keeps to these hints together: --pin layer0=1, --pin layer1=2; drop or change some",
        ),
        ({"pins": (("layerO", 0),)}, "no layer 'layerO'; did you mean"),
        ({"replicas": (2,), "straight": True}, "contradict"),
        ({"replicas": (1, 1), "most_stages": 1}, "drop one hint"),
        ({"most_stages": 0}, "at least one"),
        ({"replicas": (0,)}, "at least one"),
    ]
    for asked, words in cases:
        with pytest.raises(PenstockError, match=words):
            make_plan(profile, cluster, hints=Hints(**asked))  # type: ignore[arg-type]


# Memory


def test_a_stage_that_does_not_fit_recomputes_and_takes_the_time_for_it() -> None:
    profile = chain_profile([1.0, 1.0], batch_size=1, saved_bytes=1000, value_bytes=1, parameter_bytes=1)
    roomy = make_plan(profile, flat_cluster(2, bytes_per_s=1e3), hints=Hints(straight=True))
    assert [stage.recompute for stage in roomy.stages] == [False, False]
    tight_cluster = flat_cluster(2, bytes_per_s=1e3, memory_bytes=1500)
    tight = make_plan(profile, tight_cluster, hints=Hints(straight=True))
    assert [stage.recompute for stage in tight.stages] == [True, False]
    assert tight.prediction.seconds_per_minibatch == pytest.approx(4.0, rel=0.03)
    assert roomy.prediction.seconds_per_minibatch == pytest.approx(3.0, rel=0.03)


def test_a_pipeline_too_deep_for_its_memory_runs_with_fewer_in_flight() -> None:
    profile = chain_profile([1.0] * 3, batch_size=1, saved_bytes=10, value_bytes=0, parameter_bytes=1000)
    plan = make_plan(profile, flat_cluster(3, memory_bytes=3100), recompute=False)
    assert [len(stage.layers) for stage in plan.stages] == [1, 1, 1]
    assert max(stage.in_flight for stage in plan.stages) <= 2
    assert plan.prediction.seconds_per_minibatch > 3.0


def test_what_does_not_fit_is_explained_by_stage_amount_and_remedies_that_work() -> None:
    profile = chain_profile([1.0] * 4, batch_size=8, saved_bytes=10**6, parameter_bytes=10**6)
    cluster = flat_cluster(2, memory_bytes=9_000_000)
    with pytest.raises(PenstockError) as refused:
        make_plan(profile, cluster)
    text = str(refused.value)
    for words in ("no plan for toy fits flat", "of 2 stages", "for stage", "too little", "What would fit"):
        assert words in text
    assert "a batch of 2 instead of 8" in text
    assert make_plan(replace(profile, batch_size=2), cluster)


# Inference


def test_inference_takes_the_lowest_latency_that_keeps_the_rate() -> None:
    profile = chain_profile([1.0, 1.0, 1.0, 1.0], batch_size=1, value_bytes=100)
    cluster = flat_cluster(4, bytes_per_s=1e3)  # a cut costs a tenth of a second
    calm = make_plan(profile, cluster, schedule="inference", samples_per_s=0.2)
    assert (stages_of(calm), calm.prediction.latency_s) == ([(0, 1, 2, 3)], pytest.approx(4.0))
    busy = make_plan(profile, cluster, schedule="inference", samples_per_s=0.9)
    assert busy.prediction.seconds_per_minibatch <= 1 / 0.9
    assert busy.prediction.latency_s == pytest.approx(4.0)  # four replicas of everything wait for nobody
    straight = make_plan(profile, cluster, schedule="inference", samples_per_s=0.9, hints=Hints(straight=True))
    assert straight.prediction.latency_s == pytest.approx(4.3)
    with pytest.raises(PenstockError, match="cannot serve 2 samples/s"):
        make_plan(profile, cluster, schedule="inference", samples_per_s=2.0)


def test_the_search_counts_the_shares_that_the_plan_will_have_where_messages_take_a_workers_time() -> None:
    cluster = Cluster(
        name="unequal",
        devices=tuple(Device(speed=speed) for speed in (1.6, 2.9, 3.7)),
        levels=(Level(size=3, bytes_per_s=1e10),),
        handling_s=1e-3,
        copying_bytes_per_s=1e6,
    )
    asked = request(chain_profile([0.037, 0.021], value_bytes=500), cluster)
    assert found_s(asked) == pytest.approx(best_s(asked), rel=1e-6)
