"""The trace for ui.perfetto.dev, read back with Perfetto's own schema; and the figures."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.cluster import parse_cluster
from penstock.errors import FormatError
from penstock.planner import make_plan
from penstock.report import Outcome, perfetto_trace, write_figures
from penstock.run import Evaluation
from penstock.schedule import Kind
from penstock.simulate import simulate
from test_report import chain, measured_from, outcome, record_of, replicated


@pytest.fixture(scope="module")
def found() -> Outcome:
    plan = replicated(make_plan(chain(), parse_cluster("local:3")))
    simulated = simulate(plan, 8)
    evaluations = (Evaluation(epoch=0, steps=5, values={"loss": 0.5, "accuracy": None}),)
    return outcome(plan, simulated, record=record_of(plan, measured_from(simulated)), evaluations=evaluations)


@pytest.fixture(scope="module")
def packets(found: Outcome) -> Any:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    read = schema.Trace()
    read.ParseFromString(perfetto_trace(found))
    assert read.IsInitialized()
    return read.packet


def tracks(packets: Any) -> dict[int, Any]:
    return {p.track_descriptor.uuid: p.track_descriptor for p in packets if p.HasField("track_descriptor")}


def test_every_field_is_one_that_perfetto_knows(packets: Any) -> None:
    unknown = pytest.importorskip("google.protobuf.unknown_fields").UnknownFieldSet

    def check(message: Any) -> None:
        assert len(unknown(message)) == 0, message
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                for each in value if field.is_repeated else [value]:
                    check(each)

    for packet in packets:
        check(packet)
        assert packet.trusted_packet_sequence_id == 1


def test_workers_are_threads_of_a_measured_and_a_simulated_process(packets: Any, found: Outcome) -> None:
    described = tracks(packets).values()
    assert [t.process.process_name for t in described if t.HasField("process")] == ["measured", "simulated"]
    assert [t.thread.thread_name for t in described if t.HasField("thread")] == [*found.plan.worker_names * 2]
    assert len({(t.thread.pid, t.thread.tid) for t in described if t.HasField("thread")}) == 6


def test_slices_are_the_traces_events_and_close_in_order(packets: Any, found: Outcome) -> None:
    open_since: dict[int, tuple[int, str]] = {}
    slices: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    last_ns = 0
    for packet in packets:
        event = packet.track_event
        if not packet.HasField("track_event") or event.type not in (1, 2):
            continue
        assert packet.timestamp >= last_ns
        last_ns = packet.timestamp
        if event.type == 1:
            assert event.track_uuid not in open_since
            open_since[event.track_uuid] = (packet.timestamp, event.name)
        else:
            start_ns, name = open_since.pop(event.track_uuid)
            slices[event.track_uuid].append((name, start_ns, packet.timestamp))
    assert not open_since
    threads = [uuid for uuid, track in tracks(packets).items() if track.HasField("thread")]
    for worker, uuid in enumerate(threads[:3]):
        expected = [e for e in found.measured.events if e.worker == worker]
        assert [(start, end) for _, start, end in slices[uuid]] == [
            (round(e.start_s * 1e9), round(e.end_s * 1e9)) for e in expected
        ]
        assert slices[uuid][0][0] == f"forward {expected[0].action.index}"


def test_arrows_follow_the_messages(packets: Any, found: Outcome) -> None:
    """Two stages: of every microbatch a value travels one way and a gradient the other."""
    leaving = [flow for p in packets for flow in p.track_event.flow_ids]
    coming = [flow for p in packets for flow in p.track_event.terminating_flow_ids]
    microbatches = len(found.measured.samples)
    assert sorted(leaving) == sorted(coming)
    assert len(set(leaving)) == len(leaving) == 2 * 2 * microbatches
    from_forward = {f for p in packets for f in p.track_event.flow_ids if p.track_event.name.startswith("forward")}
    to_forward = {
        f for p in packets for f in p.track_event.terminating_flow_ids if p.track_event.name.startswith("forward")
    }
    assert from_forward == to_forward


def test_memory_is_a_counter_and_marks_are_instants(packets: Any, found: Outcome) -> None:
    counters = {uuid: t for uuid, t in tracks(packets).items() if t.HasField("counter")}
    assert [t.name for t in counters.values()] == [f"memory of {name}" for name in found.plan.worker_names]
    assert {t.counter.unit for t in counters.values()} == {3}
    first = next(iter(counters))
    values = [p.track_event.counter_value for p in packets if p.track_event.track_uuid == first]
    assert values == [m.memory_bytes[0] for m in found.record.moments]
    instants = [p.track_event.name for p in packets if p.track_event.type == 3]
    assert instants == [mark.text for mark in found.record.marks]


def test_figures_are_of_what_the_run_has(tmp_path: Path, found: Outcome) -> None:
    names = ["timeline", "utilisation", "loss", "evaluations", "throughput", "memory"]
    written = write_figures(tmp_path / "new", found)
    assert [path.stem for path in written] == names
    for path in written:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width == 1350
    bare = outcome(found.plan, replace(found.simulated, events=()), losses=[])
    assert [path.stem for path in write_figures(tmp_path / "bare", bare)] == names[:2]


def test_matplotlib_that_is_missing_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Outcome
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FormatError, match=r"pip install 'penstock\[figures\]'"):
        write_figures(tmp_path, found)


def test_halves_of_backwards_have_names_and_arrows() -> None:
    plan = make_plan(chain(), parse_cluster("local:2"), schedule="zb-h1", microbatches=4)
    simulated = simulate(plan, 2)
    assert any(event.action.kind is Kind.WEIGHT for event in simulated.events)
    assert b"backward for weights 3" in perfetto_trace(outcome(plan, simulated))
