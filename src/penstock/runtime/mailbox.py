"""A worker's messages, derived from the schedule: what it will receive, in which order, and what it sends to whom.

Receives are posted ahead of need and sends never block, so transfers run while the worker computes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.payload import Layout, decode_header, empty_header, encode_header, layout_of
from penstock.runtime.transport import Channel, Pending, Transport
from penstock.schedule import Action, Kind, Pipeline, Schedule, dependencies

AHEAD = 2
"""Receives kept posted per channel: one arriving while one is worked on."""

Edge = tuple[int, int]
"""(producer stage, consumer stage)"""


@dataclass(frozen=True)
class _Posted:
    action: Action
    layout: Layout
    tensors: list[Tensor | None]
    pending: list[Pending]

    def arrived(self) -> list[Tensor | None]:
        """Leaves of the receiver's graph, now that nothing writes into them any more."""
        pairs = zip(self.layout, self.tensors, strict=True)
        return [
            tensor.requires_grad_(entry.differentiable) if entry and tensor is not None else None
            for entry, tensor in pairs
        ]


class Mailbox:
    """One worker's ends of all its channels."""

    def __init__(
        self,
        pipeline: Pipeline,
        edges: Mapping[Edge, int],
        *,
        transport: Transport,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """``edges`` says how many values each pair of stages exchanges; as many gradients come back."""
        self.pipeline, self.edges = pipeline, edges
        self.transport, self.device, self.timeout_s = transport, device, timeout_s
        self.stage = pipeline.stage_of[transport.rank]
        self._samples: Sequence[int] = ()
        self._expected: dict[Channel, deque[Action]] = {}
        self._posted: dict[Channel, deque[_Posted]] = {}
        self._arrived: dict[Action, list[Tensor | None]] = {}
        self._leaving: deque[tuple[Pending, Action, int]] = deque()
        # What both ends of a channel know of each other: layouts by edge and size, and how many tensors have passed.
        self._sent_layouts: dict[tuple[Channel, Edge, int], Layout] = {}
        self._received_layouts: dict[tuple[Channel, Edge, int], Layout] = {}
        self._sent: dict[Channel, int] = defaultdict(int)
        self._received: dict[Channel, int] = defaultdict(int)

    def begin(self, schedule: Schedule, samples: Sequence[int]) -> None:
        """Expect the messages of a schedule whose microbatches have these numbers of samples."""
        self._samples = samples
        self._expected = expected_messages(schedule, self.transport.rank)
        self._posted = {channel: deque() for channel in self._expected}

    def post_receives(self) -> None:
        """Keep the next receives of every channel posted, as far as their layout is known."""
        for channel, expected in self._expected.items():
            while expected and len(self._posted[channel]) < AHEAD:
                layout = self._received_layouts.get(self._key(channel, expected[0], self.stage))
                if layout is None:
                    break
                self._post(channel, expected.popleft(), layout)

    def take(self, need: Action) -> list[Tensor | None]:
        """What an action of another stage made for this one, waiting for it if it is not here yet."""
        sender = self.pipeline.worker_of(need.stage, need.index)
        channel = (sender, need.kind)
        while need not in self._arrived:
            if not self._posted[channel]:
                action = self._expected[channel].popleft()
                self._post(channel, action, self._layout(channel, action))
            posted = self._posted[channel].popleft()
            for pending in posted.pending:
                self._wait(pending, f"{posted.action} from worker {sender}")
            self._arrived[posted.action] = posted.arrived()
        return self._arrived.pop(need)

    def send(self, action: Action, target_stage: int, tensors: Sequence[Tensor | None]) -> None:
        """Hand what an action made to the worker of ``target_stage`` that has the same microbatch."""
        receiver = self.pipeline.worker_of(target_stage, action.index)
        channel = (receiver, action.kind)
        key, layout = self._key(channel, action, target_stage), layout_of(tensors)
        known = self._sent_layouts.setdefault(key, layout)
        if known is layout:  # the first of its size says what is coming
            self._start_send(encode_header(layout).to(self.device), channel, action)
        elif known != layout:
            raise WorkerError(
                f"{action} makes {_show(layout)} where it made {_show(known)} for as many samples before; "
                "pad the data so that equal batches have equal shapes"
            )
        for tensor in tensors:
            if tensor is not None:
                self._start_send(tensor.detach().contiguous(), channel, action)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        while self._leaving:
            pending, action, receiver = self._leaving.popleft()
            self._wait(pending, f"worker {receiver} to receive {action}")

    def _start_send(self, tensor: Tensor, channel: Channel, action: Action) -> None:
        number, self._sent[channel] = self._sent[channel], self._sent[channel] + 1
        self._leaving.append((self.transport.send(tensor, channel, number), action, channel[0]))
        while self._leaving and self._leaving[0][0].is_over():
            self._leaving.popleft()

    def _start_receive(self, tensor: Tensor, channel: Channel) -> Pending:
        number, self._received[channel] = self._received[channel], self._received[channel] + 1
        return self.transport.receive(tensor, channel, number)

    def _post(self, channel: Channel, action: Action, layout: Layout) -> None:
        tensors = [None if entry is None else entry.empty(self.device) for entry in layout]
        pending = [self._start_receive(tensor, channel) for tensor in tensors if tensor is not None]
        self._posted[channel].append(_Posted(action, layout, tensors, pending))

    def _layout(self, channel: Channel, action: Action) -> Layout:
        """Known from an earlier message of the same size, or in the header that comes first."""
        key = self._key(channel, action, self.stage)
        if key not in self._received_layouts:
            header = empty_header(self.edges[self._edge(action, self.stage)]).to(self.device)
            self._wait(self._start_receive(header, channel), f"{action} from worker {channel[0]}")
            self._received_layouts[key] = decode_header(header)
        return self._received_layouts[key]

    def _key(self, channel: Channel, action: Action, target_stage: int) -> tuple[Channel, Edge, int]:
        return channel, self._edge(action, target_stage), self._samples[action.index]

    @staticmethod
    def _edge(action: Action, target_stage: int) -> Edge:
        forward = action.kind is Kind.FORWARD
        return (action.stage, target_stage) if forward else (target_stage, action.stage)

    def _wait(self, pending: Pending, what: str) -> None:
        try:
            pending.wait(self.timeout_s)
        except WorkerError as error:
            raise WorkerError(
                f"worker {self.transport.rank} (stage {self.stage}) waited for {what} (at most {self.timeout_s:g} s): "
                f"{error}. See what that worker reports; raise --timeout if it is only slow"
            ) from error


def expected_messages(schedule: Schedule, worker: int) -> dict[Channel, deque[Action]]:
    """What a worker will receive on each channel, in the order in which the sender sends it."""
    pipeline = schedule.pipeline
    needed: dict[Channel, set[Action]] = defaultdict(set)
    for action in schedule.programs[worker]:
        for need in dependencies(action, pipeline):
            sender = pipeline.worker_of(need.stage, need.index)
            if sender != worker:
                needed[sender, need.kind].add(need)
    return {
        channel: deque(action for action in schedule.programs[channel[0]] if action in actions)
        for channel, actions in needed.items()
    }


def _show(layout: Layout) -> str:
    return ", ".join("nothing" if entry is None else str(list(entry.shape)) for entry in layout)
