"""Invariant 7: never predicted slower than plain data parallelism or one device, and never better than the bound."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import SYNCHRONOUS, TRAINING, chain_profile, clusters, flat_cluster, law, profiles, slow_law
from penstock import codec
from penstock.cluster import Cluster, Device, Level
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.schedule import check
from penstock.simulate import simulate

SOURCE = Path(__file__).parents[1] / "src"
KiB = 1024

schedules = st.sampled_from(TRAINING)


@law
@given(profiles(), clusters(), schedules)
def test_a_plan_is_never_predicted_slower_than_data_parallelism_or_one_device(
    profile: Profile, cluster: Cluster, schedule: str
) -> None:
    prediction = make_plan(profile, cluster, schedule=schedule).prediction
    assert prediction.one_device_s is not None
    if prediction.data_parallel_s is None:  # more replicas than microbatches to an update
        assert schedule == "2bw"
    else:
        assert prediction.seconds_per_minibatch <= prediction.data_parallel_s
    assert prediction.seconds_per_minibatch <= prediction.one_device_s


@law
@given(profiles(), clusters(), schedules)
def test_a_plan_is_never_predicted_faster_than_its_bound(profile: Profile, cluster: Cluster, schedule: str) -> None:
    prediction = make_plan(profile, cluster, schedule=schedule).prediction
    assert prediction.lower_bound_s <= prediction.seconds_per_minibatch * (1 + 1e-9)
    assert prediction.gap >= -1e-9


@slow_law
@given(profiles(), clusters(), schedules)
def test_the_same_question_gets_the_same_plan(profile: Profile, cluster: Cluster, schedule: str) -> None:
    first = make_plan(profile, cluster, schedule=schedule)
    read = codec.loads(Profile, codec.dumps(profile), "profile")
    assert make_plan(read, cluster, schedule=schedule) == first


@slow_law
@given(profiles(), clusters(), schedules)
def test_stages_divide_the_layers_between_cuts_and_devices_are_used_once(
    profile: Profile, cluster: Cluster, schedule: str
) -> None:
    plan = make_plan(profile, cluster, schedule=schedule)
    assert sorted(layer for stage in plan.stages for layer in stage.layers) == sorted(profile.graph.order)
    done: set[int] = set()
    for stage in plan.stages:  # each stage ends at a cut: with a layer, all that it reads is done
        done.update(stage.layers)
        for value in profile.graph.values:
            assert value.producer in done or not done.intersection(value.consumers)
    assert len(set(plan.devices)) == len(plan.devices) <= len(cluster.devices)
    check(plan.schedule_for([plan.microbatches] * 3))


@slow_law
@given(profiles(), clusters(), st.sampled_from(SYNCHRONOUS), st.data())
def test_a_plan_keeps_the_microbatches_that_were_asked_for(
    profile: Profile, cluster: Cluster, schedule: str, data: st.DataObject
) -> None:
    asked = data.draw(st.integers(1, profile.batch_size))
    assert make_plan(profile, cluster, schedule=schedule, microbatches=asked).microbatches == asked


@slow_law
@given(profiles(max_layers=8), clusters())
def test_layers_that_share_a_weight_stay_in_one_stage_under_pipedream(profile: Profile, cluster: Cluster) -> None:
    plan = make_plan(profile, cluster, schedule="pipedream")
    for parameter in profile.graph.parameters:
        users = [layer.id for layer in profile.graph.layers if parameter.name in layer.parameters]
        assert len({plan.stage_of_layer[layer] for layer in users}) <= 1


def test_tied_ends_force_one_stage_under_pipedream_but_not_under_1f1b() -> None:
    """Weights too large to average by data parallelism, so a pipeline pays where it is allowed."""
    profile = chain_profile([1.0] * 4, batch_size=64, microbatch_size=64, parameter_bytes=10**9, tied=(0, 3))
    cluster = flat_cluster(2, bytes_per_s=1e9)
    assert len(make_plan(profile, cluster, schedule="pipedream").stages) == 1
    untied = replace(profile, graph=chain_profile([1.0] * 4, parameter_bytes=10**9).graph)
    assert len(make_plan(untied, cluster, schedule="pipedream").stages) == 2


def test_a_heavy_model_on_slow_links_becomes_a_balanced_pipeline() -> None:
    profile = chain_profile([2.0, 1.0, 1.0, 4.0], batch_size=1, value_bytes=1, parameter_bytes=10**9)
    plan = make_plan(profile, flat_cluster(2, bytes_per_s=1e6))
    assert [stage.layers for stage in plan.stages] == [(0, 1, 2), (3,)]
    assert plan.prediction.seconds_per_minibatch == pytest.approx(12.0, rel=1e-3)
    assert plan.prediction.gap == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("schedule", TRAINING)
def test_a_light_model_on_fast_links_becomes_data_parallel(schedule: str) -> None:
    profile = chain_profile([1.0, 1.0, 1.0], batch_size=48, value_bytes=10**9, parameter_bytes=1)
    plan = make_plan(profile, flat_cluster(4), schedule=schedule)
    assert [len(stage.devices) for stage in plan.stages] == [4]
    assert plan.prediction.seconds_per_minibatch == plan.prediction.data_parallel_s


@slow_law
@given(profiles(), clusters(max_devices=4), schedules, st.integers(1, 10**7))
def test_every_stage_of_a_plan_fits_its_devices_or_there_is_no_plan(
    profile: Profile, cluster: Cluster, schedule: str, memory_bytes: int
) -> None:
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    try:
        plan = make_plan(profile, replace(cluster, devices=devices), schedule=schedule)
    except PlanError:
        return
    assert max(map(PlanCosts(plan).memory_bytes, range(len(plan.devices)))) <= memory_bytes


@pytest.mark.parametrize("schedule", TRAINING)
def test_a_model_that_fits_nowhere_is_refused_with_what_it_needs_and_what_there_is(schedule: str) -> None:
    profile = chain_profile([1.0, 1.0], parameter_bytes=10**9)
    need = 3 if schedule == "2bw" else 2  # which always keeps two versions of the weights
    words = rf"no plan for toy fits flat.*needs {need} GB for stage 0.*has 5 MB, {need} GB too.*{2 * need}e\+02 times"
    with pytest.raises(PlanError, match=words):
        make_plan(profile, flat_cluster(2, memory_bytes=5_000_000), schedule=schedule)


def test_a_memory_limit_that_forbids_one_device_leaves_a_pipeline_and_says_there_is_no_baseline() -> None:
    profile = chain_profile([1.0] * 4, batch_size=1, parameter_bytes=KiB)
    plan = make_plan(profile, flat_cluster(4, memory_bytes=5 * KiB))
    assert len(plan.stages) > 1
    assert (plan.prediction.data_parallel_s, plan.prediction.one_device_s) == (None, None)


def test_a_model_that_only_the_slow_device_can_hold_runs_there() -> None:
    devices = (Device(speed=0.5, memory_bytes=100 * KiB), Device(speed=1.0, memory_bytes=1 * KiB))
    cluster = Cluster(name="uneven", devices=devices, levels=(Level(size=2, bytes_per_s=1e9),))
    plan = make_plan(chain_profile([1.0], parameter_bytes=10 * KiB), cluster)
    assert plan.devices == (0,)
    assert plan.prediction.one_device_s == plan.prediction.seconds_per_minibatch


def test_gpipe_finds_the_cut_that_holds_a_whole_minibatch_of_activations() -> None:
    """Three layers and one would balance, but eight microbatches of three layers' activations do not fit."""
    profile = chain_profile([1.0, 1.0, 1.0, 3.0], batch_size=8, saved_bytes=KiB, parameter_bytes=100)
    cluster = flat_cluster(2, memory_bytes=16 * KiB + 500)
    assert [
        s.layers for s in make_plan(profile, cluster, schedule="gpipe", microbatches=8, recompute=False).stages
    ] == [(0, 1), (2, 3)]


def test_an_asynchronous_plan_with_several_microbatches_is_refused() -> None:
    with pytest.raises(PlanError, match="leave --microbatches out"):
        make_plan(chain_profile([1.0]), flat_cluster(1), schedule="pipedream", microbatches=4)


@pytest.mark.parametrize("asked", [-1, 9])
def test_microbatches_that_a_batch_cannot_give_are_refused(asked: int) -> None:
    with pytest.raises(PlanError, match=f"{asked} microbatches from a batch of 8; choose 1 to 8"):
        make_plan(chain_profile([1.0]), flat_cluster(1), schedule="1f1b", microbatches=asked)


@slow_law
@given(profiles(), clusters(), schedules)
def test_on_fast_links_a_prediction_is_what_a_longer_simulation_says_of_the_plan(
    profile: Profile, cluster: Cluster, schedule: str
) -> None:
    levels = tuple(replace(level, bytes_per_s=1e15, latency_s=0.0) for level in cluster.levels)
    plan = make_plan(profile, replace(cluster, levels=levels), schedule=schedule)
    in_flight = plan.pipeline.round_sizes[0] * plan.stages[0].in_flight
    rate = simulate(plan, 20 * (len(plan.devices) + in_flight)).samples_per_s
    assert plan.prediction.seconds_per_minibatch == pytest.approx(profile.batch_size / rate, rel=0.03)


def test_a_plan_is_made_and_simulated_without_torch(tmp_path: Path) -> None:
    codec.save(chain_profile([1.0, 2.0]), tmp_path / "profile.json")
    script = """
import sys
sys.modules["torch"] = None  # from here on, `import torch` raises ImportError
import penstock.planner
from pathlib import Path
from penstock import codec, simulate
from penstock.cluster import parse_cluster
from penstock.profile import Profile
plan = penstock.planner.make_plan(codec.load(Profile, Path(sys.argv[1])), parse_cluster("local:2"))
codec.save(plan, Path(sys.argv[2]))
assert simulate.simulate(plan, 8).samples_per_s > 0
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
    files = [str(tmp_path / name) for name in ("profile.json", "plan.json")]
    run = subprocess.run(
        [sys.executable, "-c", script, *files],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.stderr == ""
    assert run.returncode == 0
    assert codec.load(Plan, tmp_path / "plan.json").profile.model == "toy"
