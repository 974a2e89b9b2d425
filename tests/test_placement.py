"""Workers are where the plan puts them, or the run says where they are and does not begin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from in_threads import even_plan, profile_of
from penstock import codec
from penstock.bench.hosts import make_hosts, why_not
from penstock.cluster import Cluster, Device, local_cluster, parse_cluster
from penstock.errors import PlanError, WorkerError
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.runtime.process.launch import _reported
from penstock.runtime.process.placement import Whereabouts, compare_placement
from test_processes import penstock, write_job


def plan_for(cluster: Cluster, devices: Sequence[int] | None = None) -> Plan:
    """A stage on each device, in this order."""
    plan = even_plan(profile_of("tied"), (1,) * len(cluster.devices), "1f1b")
    order = range(len(cluster.devices)) if devices is None else devices
    stages = tuple(replace(stage, devices=(device,)) for stage, device in zip(plan.stages, order, strict=True))
    return replace(plan, cluster=cluster, stages=stages)


def on(hosts: str, kind: str = "cpu") -> list[Whereabouts]:
    """A letter for each worker's host."""
    return [Whereabouts(f"node-{host}", host, kind) for host in hosts]


TWO_BY_TWO = parse_cluster("2@12GB/s,2@1.25GB/s")


@pytest.mark.parametrize("hosts", ["aabb", "bbaa"])
def test_workers_on_the_hosts_of_the_plan_are_right(hosts: str) -> None:
    assert compare_placement(plan_for(TWO_BY_TWO), on(hosts)) == ""


@pytest.mark.parametrize(("hosts", "wrong"), [("abab", "workers 1, 3"), ("abbb", "worker 1"), ("aaab", "worker 3")])
def test_workers_of_one_planned_host_on_several_are_refused_with_a_table(hosts: str, wrong: str) -> None:
    with pytest.raises(PlanError) as error:
        compare_placement(plan_for(TWO_BY_TWO), on(hosts))
    words, header, *rows = str(error.value).splitlines()
    assert words.startswith(
        f"{wrong} of 4: not where the plan has them; start them with --nnodes 2 and --nproc-per-node 2"
    )
    assert words.endswith("or profile and plan again for what there is")
    assert header.split() == ["worker", "planned", "found"]
    assert all(f"node-{hosts[int(row.split()[0])]}, cpu" in row for row in rows)
    assert [row.split()[0] for row in rows if "differs" in row] == wrong.replace(",", "").split()[1:]


def test_the_table_leaves_out_hosts_that_are_as_planned() -> None:
    with pytest.raises(PlanError) as error:
        compare_placement(plan_for(parse_cluster("2@12GB/s,3@1.25GB/s")), on("aabccc"))
    assert [row.split()[0] for row in str(error.value).splitlines()[2:]] == ["2", "3"]


def test_a_plan_for_several_hosts_may_be_tried_on_one() -> None:
    warning = compare_placement(plan_for(TWO_BY_TWO), on("aaaa"))
    assert warning == "workers that the plan puts on 2 hosts run on node-a: links and cores are not as planned"


def test_a_plan_for_memory_that_workers_share_is_for_one_host() -> None:
    assert compare_placement(plan_for(local_cluster(3)), on("aaa")) == ""
    with pytest.raises(PlanError, match=r"worker 2 of 3: .*--nnodes 1 and --nproc-per-node 3"):
        compare_placement(plan_for(local_cluster(3)), on("aab"))


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aba"])
def test_a_single_level_of_a_network_may_join_hosts_of_one_device(hosts: str) -> None:
    """As `penstock cluster measure` writes it for those."""
    assert compare_placement(plan_for(parse_cluster("3@1.25GB/s")), on(hosts)) == ""


def of_kinds(*kinds: str) -> Plan:
    plan = plan_for(replace(local_cluster(len(kinds)), devices=tuple(Device(kind=kind) for kind in kinds)))
    (costs,) = plan.profile.seconds.values()
    return replace(plan, profile=replace(plan.profile, seconds=dict.fromkeys(kinds, costs), other_sizes=()))


def test_a_device_of_another_kind_is_refused() -> None:
    plan = of_kinds("Tesla T4", "cpu")
    assert compare_placement(plan, [*on("a", "Tesla T4"), *on("a")]) == ""
    with pytest.raises(PlanError, match=r"worker 0 of 2: .*start the workers on devices of the planned kind") as error:
        compare_placement(plan, on("aa"))
    assert " ".join(str(error.value).splitlines()[2].split()) == "0 host 0, Tesla T4 node-a, cpu <- differs"


def test_kinds_that_are_not_torch_s_never_refuse() -> None:
    assert compare_placement(of_kinds("any", "any"), on("aa", "Tesla T4")) == ""
    plan = of_kinds("Fast", "Slow")
    assert compare_placement(replace(plan, profile=replace(plan.profile, front_end="sparsepipe")), on("aa")) == ""


def test_hosts_of_one_name_are_told_apart() -> None:
    found = [Whereabouts("node", identity, "cpu") for identity in "abab"]
    with pytest.raises(PlanError, match="node #2, cpu  <- differs"):
        compare_placement(plan_for(TWO_BY_TWO), found)


def test_a_launcher_shows_the_table_of_a_worker_that_refused(tmp_path: Path) -> None:
    words = tmp_path / "0.json"
    words.write_text(json.dumps({"message": {"message": "PlanError: not there\nworker  planned\n0       host 0"}}))
    assert _reported(words) == (PlanError, "not there\nworker  planned\n0       host 0")


# --- workers are numbered as launchers start them


def test_workers_are_numbered_host_by_host_whatever_the_order_of_the_stages() -> None:
    plan = plan_for(TWO_BY_TWO, (3, 1, 2, 0))
    assert plan.devices == (1, 0, 3, 2)
    assert plan.pipeline.workers == ((2,), (0,), (3,), (1,))
    assert compare_placement(plan, on("aabb")) == ""


def test_workers_on_unequal_devices_of_a_host_are_numbered_as_the_devices() -> None:
    unequal = replace(local_cluster(3), devices=(Device(), Device(speed=0.5), Device()))
    assert plan_for(unequal, (2, 1, 0)).devices == (0, 1, 2)
    assert plan_for(local_cluster(3), (2, 1, 0)).devices == (2, 1, 0)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b", "interleaved"])
def test_every_plan_for_several_hosts_can_be_started_by_torchrun(schedule: str) -> None:
    """The planner may alternate between hosts from stage to stage."""
    plan = make_plan(profile_of("transformer"), TWO_BY_TWO, schedule=schedule)
    hosts = [TWO_BY_TWO.host(device) for device in plan.devices]
    assert hosts == sorted(hosts)


# --- processes


@pytest.mark.processes
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_run_whose_workers_are_on_other_hosts_is_refused_before_it_begins(tmp_path: Path) -> None:
    job, file, run = write_job(tmp_path, "tied", epochs=1), tmp_path / "plan.json", tmp_path / "run"
    arguments = ["-m", "penstock", "train", str(job), str(file), "--run-dir", str(run), "--timeout", "30"]
    with make_hosts(2) as hosts:
        codec.save(plan_for(local_cluster(2)), file)
        with pytest.raises(WorkerError, match=r"1 +host 0, any +host1, cpu +<- differs"):
            hosts.run_workers(arguments, timeout_s=120)
        assert not (run / "result.json").exists()
        codec.save(plan_for(parse_cluster("1@12GB/s,2@1GB/s")), file)
        hosts.run_workers(arguments, timeout_s=120)
    assert json.loads((run / "result.json").read_text())["links"] == {"0-1": "gloo"}


@pytest.mark.processes
def test_a_plan_for_other_devices_is_refused_and_one_for_more_hosts_warns(tmp_path: Path) -> None:
    job, file, run = write_job(tmp_path, "tied", epochs=1), tmp_path / "plan.json", tmp_path / "run"
    codec.save(of_kinds("Tesla T4", "Tesla T4"), file)
    refused = penstock("train", job, file, "--run-dir", run, check=False)
    assert refused.returncode == 2
    assert "planned kind" in refused.stderr
    assert "1       host 0, Tesla T4" in refused.stderr
    codec.save(plan_for(parse_cluster("1@12GB/s,2@1GB/s")), file)
    tried = penstock("train", job, file, "--run-dir", run)
    assert tried.stderr.count("workers that the plan puts on 2 hosts run on") == 1
