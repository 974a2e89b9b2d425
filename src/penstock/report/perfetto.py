"""A run as a trace for ui.perfetto.dev: a row of slices for each worker, arrows for messages, memory as counters.

The format is Perfetto's protobuf, of which a few messages suffice. They are defined in its ``perfetto_trace.proto``;
numbers here are the field numbers there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import count

from penstock.report.outcome import Outcome
from penstock.report.stages import KIND_NAMES
from penstock.schedule import Action, Pipeline, dependencies
from penstock.trace import Event

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
"""Types of TrackEvent."""
BYTES = 3
"""A unit of CounterDescriptor."""
SEQUENCE = 1
"""The number of the only writer."""


def perfetto_trace(outcome: Outcome) -> bytes:
    """The measured trace and the simulated one, each as a process whose threads are the workers."""
    uuids = count(1)
    packets: list[tuple[int, bytes]] = []
    both = ((outcome.measured, outcome.measured_events), (outcome.simulated, outcome.simulated.events))
    for pid, (trace, events) in enumerate(both, start=1):
        process = next(uuids)
        descriptor = _number(1, pid) + _text(6, trace.origin)
        packets.append((0, _track(process, _message(3, descriptor))))
        threads = [next(uuids) for _ in trace.workers]
        for worker, (uuid, name) in enumerate(zip(threads, trace.workers, strict=True)):
            descriptor = _number(1, pid) + _number(2, worker + 1) + _text(5, name)
            packets.append((0, _track(uuid, _message(4, descriptor))))
        packets += _slices(events, threads, outcome.plan.pipeline, pid)
        if trace is outcome.measured:
            packets += _counters(outcome, process, uuids)
            packets += _marks(outcome, process, next(uuids))
    packets.sort(key=lambda packet: packet[0])  # stable: an end comes before a begin at the same time
    return b"".join(_message(1, body) for _, body in packets)


def _slices(events: Sequence[Event], threads: list[int], pipeline: Pipeline, pid: int) -> Iterator[tuple[int, bytes]]:
    arrows = _arrows(events, pipeline, pid)
    for event in events:
        leaving, coming = arrows.get((event.worker, event.action), ((), ()))
        name = f"{KIND_NAMES[event.action.kind]} {event.action.index}"
        details = _detail("stage", event.action.stage)
        details += _detail("microbatch" if event.action.of_microbatch else "round", event.action.index)
        flows = b"".join(_fixed(47, flow) for flow in leaving) + b"".join(_fixed(48, flow) for flow in coming)
        track = threads[event.worker]
        yield _event(
            event.start_s, BEGIN, track, _text(22, KIND_NAMES[event.action.kind]) + _text(23, name) + details + flows
        )
        yield _event(event.end_s, END, track, b"")


Arrows = dict[tuple[int, Action], tuple[list[int], list[int]]]
"""For each worker and action, the flows that leave it and the flows that end at it."""


def _arrows(events: Sequence[Event], pipeline: Pipeline, pid: int) -> Arrows:
    """An arrow for each message: from the action that makes a result to the action that needs it on another worker."""
    makers: dict[Action, Event] = {event.action.result: event for event in events if event.action.of_microbatch}
    arrows: Arrows = {}
    flows = count(pid << 48)  # different from those of the other trace
    for event in events:
        for need in dependencies(event.action, pipeline):
            maker = makers.get(need)
            if maker is not None and maker.worker != event.worker:
                flow = next(flows)
                arrows.setdefault((maker.worker, maker.action), ([], []))[0].append(flow)
                arrows.setdefault((event.worker, event.action), ([], []))[1].append(flow)
    return arrows


def _counters(outcome: Outcome, process: int, uuids: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    for worker, name in enumerate(outcome.measured.workers):
        seen = [(m.at_s, m.memory_bytes[worker]) for m in outcome.record.moments]
        if any(num_bytes is not None for _, num_bytes in seen):
            uuid = next(uuids)
            descriptor = _text(2, f"memory of {name}") + _number(5, process) + _message(8, _number(3, BYTES))
            yield 0, _track(uuid, descriptor)
            for at_s, num_bytes in seen:
                if num_bytes is not None:
                    yield _event(at_s, COUNTER, uuid, _number(30, max(0, num_bytes)))


def _marks(outcome: Outcome, process: int, uuid: int) -> Iterator[tuple[int, bytes]]:
    if outcome.record.marks:
        yield 0, _track(uuid, _text(2, "what happened") + _number(5, process))
    for mark in outcome.record.marks:
        yield _event(mark.at_s, INSTANT, uuid, _text(22, mark.kind) + _text(23, mark.text))


# --- packets


def _event(at_s: float, kind: int, track: int, fields: bytes) -> tuple[int, bytes]:
    at_ns = max(0, round(at_s * 1e9))
    body = _number(9, kind) + _number(11, track) + fields
    return at_ns, _number(8, at_ns) + _number(10, SEQUENCE) + _message(11, body)


def _track(uuid: int, fields: bytes) -> bytes:
    return _number(10, SEQUENCE) + _message(60, _number(1, uuid) + fields)


def _detail(name: str, value: int) -> bytes:
    return _message(4, _text(10, name) + _number(3, value))


# --- protobuf's wire format: a key (field and type), then the value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _varint(value: int) -> bytes:
    """Seven bits per byte, lowest first. All bytes but the last have the highest bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
