"""A worker's messages, derived from the schedule: what it will receive, in which order, and what it sends to whom.

Receives are posted ahead of need and sends never block, so transfers run while the worker computes. A tensor sent is
kept until a message from its receiver shows that it has come: the receiver's program makes that message no earlier
than the action that needs the tensor. Asking would not do: gloo does not say that a transfer is over before it is
waited for.

To post a receive is to know its size. Each channel starts out assuming that equal numbers of samples give equal shapes:
the first message of a size announces its layout, the others are bare tensors. The first message ``n`` that breaks this
meets receives already posted with the old layouts, for itself and at most ``AHEAD - 1`` behind it. So the sender fills
those: the first with a message marked as holding nothing, the others with anything.

    sender     .. n-1 | mark, filler            | header n, n | header n+1, n+1 | ..
    receiver   .. n-1 | posted as n, posted n+1 | header n, n | header n+1, n+1 | ..

From then on every message of that channel has a header. Both ends know which receives may be posted, because both know
the schedule and the layouts announced so far; the receiver posts what it had not yet, so that the count is right.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.messages.compress import ErrorMeter, Rounded, packing_of
from penstock.runtime.messages.header import (
    can_be_marked,
    decode_header,
    described_bytes,
    empty_header,
    encode_header,
    is_marked,
    marked,
)
from penstock.runtime.messages.packing import Layout, Packing
from penstock.runtime.messages.values import detached
from penstock.runtime.transport.base import Channel, Pending, Transport
from penstock.schedule import Action, Kind, Pipeline, Schedule, dependencies

AHEAD = 2
"""Receives kept posted per channel: one arriving while one is worked on."""
MOST_LEAVING = 8
"""Tensors on their way to a worker that never answers, so that nothing else tells that they have arrived."""

Edge = tuple[int, int]
"""(producer stage, consumer stage)"""
Message = tuple[Action, int]
"""What an action made, for a stage that needs it."""


class _Posted(NamedTuple):
    message: Message
    layout: Layout
    tensors: list[Tensor]
    """as sent"""
    packing: Packing
    pending: list[Pending]
    announced: bool
    """whether a header came first; if not, the layout is the one that such messages had so far"""


class _Leaving(NamedTuple):
    pending: Pending
    action: Action
    needed_by: Action


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
        sends: Mapping[int, str] = MappingProxyType({}),
        weighted: bool = False,
    ) -> None:
        """``edges`` says how many values each pair of stages exchanges; as many gradients come back and, if
        ``weighted``, one more tensor with them. ``sends`` says how a stage's values and their gradients travel, where
        not as they are; within a worker they stay as they are. A value is anything that a codec takes."""
        self.pipeline, self.edges, self.weighted = pipeline, edges, weighted
        stages = {stage for edge in edges for stage in edge}
        self._packings = {stage: packing_of(sends.get(stage, "exact")) for stage in stages}
        self.meter = ErrorMeter()
        self.transport, self.device, self.timeout_s = transport, device, timeout_s
        self._schedule: Schedule | None = None
        self._samples: Sequence[int] = ()
        self._expected: dict[Channel, deque[Message]] = {}
        self._posted: dict[Channel, deque[_Posted]] = {}
        self._short: set[Channel] = set()
        """those of which something was taken since receives were last posted"""
        self._headers: dict[Channel, tuple[Tensor, Pending]] = {}
        self._arrived: dict[Message, list[Any]] = {}
        self._leaving: dict[Channel, deque[_Leaving]] = defaultdict(deque)
        self._places: dict[int, dict[Action, int]] = {}
        """of each worker that sends to this one, where the actions stand in its program"""
        # What both ends of a channel know of each other: layouts by edge and size, and how many tensors have passed.
        self._sent_layouts: dict[tuple[Channel, Edge, int], Layout] = {}
        self._received_layouts: dict[tuple[Channel, Edge, int], Layout] = {}
        # Channels whose layouts change, which have a header before every message.
        self._announces: set[Channel] = set()
        self._announced: set[Channel] = set()
        self._sent: dict[Channel, int] = defaultdict(int)
        self._received: dict[Channel, int] = defaultdict(int)

    def begin(self, schedule: Schedule, samples: Sequence[int]) -> None:
        """Expect the messages of a schedule whose microbatches have these numbers of samples."""
        self._schedule, self._samples = schedule, samples
        self._expected = expected_messages(schedule, self.transport.rank)
        self._posted = {channel: deque() for channel in self._expected}
        self._short = set(self._expected)
        senders = {sender for sender, _ in self._expected}
        self._places = {
            sender: {action.result: place for place, action in enumerate(schedule.programs[sender])}
            for sender in senders
        }

    def post_receives(self) -> None:
        """Keep the next receives of every channel posted, as far as their layout is known, or else a header's."""
        for channel in self._short:
            expected = self._expected[channel]
            self._post_known(channel, AHEAD)
            if expected and not self._posted[channel] and channel not in self._headers:
                self._headers[channel] = self._post_header(channel, expected[0])
        self._short.clear()

    def take(self, need: Action, stage: int) -> list[Any]:
        """What an action of another stage made for this one, waiting for it if it is not here yet."""
        channel = (self.pipeline.worker_of(need.stage, need.index), need.kind)
        while (need, stage) not in self._arrived:
            if not self._posted[channel]:
                self._post_next(channel)
            posted = self._posted[channel].popleft()
            self._short.add(channel)
            self._see_in(posted, channel)
            if not posted.announced and is_marked(posted.tensors):
                self._recall(channel, posted.message)
            else:
                self._arrived[posted.message] = posted.packing.unpack(posted.layout, posted.tensors)
        if channel[0] != self.transport.rank:
            self._see_out(channel[0], self._places[channel[0]][need])
        return self._arrived.pop((need, stage))

    def send(self, action: Action, target_stage: int, values: Sequence[Any]) -> None:
        """Hand what an action made to the worker of ``target_stage`` that has the same microbatch."""
        receiver = self.pipeline.worker_of(target_stage, action.index)
        if receiver == self.transport.rank:
            self._arrived[action, target_stage] = [detached(value) for value in values]
            return
        channel, message = (receiver, action.kind), (action, target_stage)
        key, packing = self._key(channel, message), self._packing(message)
        packed = packing.pack(values)
        layout, tensors = packed
        if isinstance(packing, Rounded):
            direction = (*self._edge(message), "forward" if action.kind is Kind.FORWARD else "backward")
            self.meter.look(direction, partial(packing.relative_error, values, packed))
        known = None if channel in self._announces else self._sent_layouts.get(key)
        if known is not None and (known != layout or is_marked(tensors)):
            self._fill_posted(channel, message)
            known = None
        if known is None:
            for part in encode_header(layout):
                if part is not None:
                    self._start_send(part.to(self.device), channel, action, target_stage)
            if can_be_marked(layout):
                self._sent_layouts[key] = layout
        for tensor in tensors:
            self._start_send(tensor, channel, action, target_stage)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for (receiver, _), leaving in self._leaving.items():
            while leaving:
                self._see_off(receiver, leaving.popleft())

    def _start_send(self, tensor: Tensor, channel: Channel, action: Action, target_stage: int) -> None:
        number, self._sent[channel] = self._sent[channel], self._sent[channel] + 1
        needed_by = action._replace(stage=target_stage)
        leaving = self._leaving[channel]
        leaving.append(_Leaving(self.transport.send(tensor, channel, number), action, needed_by))
        # One that never answers, as without backwards, waits for nothing either that has not been sent to it before.
        if channel[0] not in self._places and len(leaving) > MOST_LEAVING:
            self._see_off(channel[0], leaving.popleft())

    def _see_out(self, receiver: int, place: int) -> None:
        """Let go of what a worker needs for the actions up to ``place`` of its program, which it has done."""
        for (worker, _), leaving in self._leaving.items():
            if worker == receiver:
                while leaving and self._places[receiver][leaving[0].needed_by] <= place:
                    self._see_off(receiver, leaving.popleft())

    def _see_off(self, receiver: int, leaving: _Leaving) -> None:
        self._wait(leaving.pending, lambda: f"worker {receiver} to receive {leaving.action}")

    def _start_receive(self, tensor: Tensor, channel: Channel) -> Pending:
        number, self._received[channel] = self._received[channel], self._received[channel] + 1
        return self.transport.receive(tensor, channel, number)

    def _post(self, channel: Channel, message: Message, layout: Layout, *, announced: bool) -> None:
        packing = self._packing(message)
        tensors = [entry.empty(self.device) for entry in packing.wire_layouts(layout)]
        pending = [self._start_receive(tensor, channel) for tensor in tensors]
        self._posted[channel].append(_Posted(message, layout, tensors, packing, pending, announced))

    def _post_known(self, channel: Channel, most: int) -> None:
        """Post what comes next without a header, until ``most`` are posted."""
        expected = self._expected[channel]
        while expected and len(self._posted[channel]) < most and channel not in self._announced:
            layout = self._received_layouts.get(self._key(channel, expected[0]))
            if layout is None:
                break
            self._post(channel, expected.popleft(), layout, announced=False)

    def _post_header(self, channel: Channel, message: Message) -> tuple[Tensor, Pending]:
        count = self.edges[self._edge(message)] + (self.weighted and message[0].kind is not Kind.FORWARD)
        header = empty_header(count).to(self.device)
        return header, self._start_receive(header, channel)

    def _post_next(self, channel: Channel) -> None:
        """Post the next message of a channel that has none posted, after its header if it has one."""
        self._post_known(channel, 1)
        if self._posted[channel]:
            return
        message = self._expected[channel].popleft()
        if channel not in self._headers:
            self._headers[channel] = self._post_header(channel, message)
        header, pending = self._headers.pop(channel)
        self._wait(pending, lambda: f"{message[0]} from worker {channel[0]}")
        layout = self._announced_layout(header, channel, message)
        if can_be_marked(layout):
            self._received_layouts[self._key(channel, message)] = layout
        self._post(channel, message, layout, announced=True)

    def _announced_layout(self, header: Tensor, channel: Channel, message: Message) -> Layout:
        """Of a header that has come; waits for the description behind it, if it says that there is one."""
        rows, description = header.tolist(), None
        if size := described_bytes(rows):
            description = torch.empty(size, dtype=torch.uint8, device=self.device)
            pending = self._start_receive(description, channel)
            self._wait(pending, lambda: f"{message[0]} from worker {channel[0]}")
        return decode_header(rows, description)

    def _see_in(self, posted: _Posted, channel: Channel) -> None:
        for pending in posted.pending:
            self._wait(pending, lambda: f"{posted.message[0]} from worker {channel[0]}")

    def _fill_posted(self, channel: Channel, message: Message) -> None:
        """Send something of the old layouts for this message and those behind it that may be posted: see above."""
        assert self._schedule is not None
        receiver, kind = channel
        coming = list(expected_messages(self._schedule, receiver)[self.transport.rank, kind])
        first = coming.index(message)
        for each in coming[first : first + AHEAD]:
            layout = self._sent_layouts.get(self._key(channel, each))
            if layout is None:
                break
            for tensor in marked(self._packing(each).wire_layouts(layout), self.device):
                self._start_send(tensor, channel, *each)
        self._announces.add(channel)

    def _recall(self, channel: Channel, message: Message) -> None:
        """Let the posted receives of the old layouts be filled, and expect their messages anew."""
        self._post_known(channel, AHEAD - 1)
        self._announced.add(channel)
        for posted in self._posted[channel]:
            self._see_in(posted, channel)
        self._expected[channel].extendleft(posted.message for posted in reversed(self._posted[channel]))
        self._expected[channel].appendleft(message)
        self._posted[channel].clear()

    def _key(self, channel: Channel, message: Message) -> tuple[Channel, Edge, int]:
        return channel, self._edge(message), self._samples[message[0].index]

    def _packing(self, message: Message) -> Packing:
        return self._packings[self._edge(message)[0]]

    @staticmethod
    def _edge(message: Message) -> Edge:
        action, target_stage = message
        forward = action.kind is Kind.FORWARD
        return (action.stage, target_stage) if forward else (target_stage, action.stage)

    @property
    def _who(self) -> str:
        rank = self.transport.rank
        return f"worker {rank} (stage {', '.join(map(str, self.pipeline.stages_of[rank]))})"

    def _wait(self, pending: Pending, what: Callable[[], str]) -> None:
        try:
            pending.wait(self.timeout_s)
        except WorkerError as error:
            raise WorkerError(
                f"{self._who} waited for {what()} (at most {self.timeout_s:g} s): "
                f"{error}. See what that worker reports; raise --timeout if it is only slow"
            ) from error


def expected_messages(schedule: Schedule, worker: int) -> dict[Channel, deque[Message]]:
    """What a worker will receive on each channel, in the order in which the sender sends it: as its program makes it,
    and for several stages, in their order."""
    pipeline = schedule.pipeline
    needed: dict[Channel, dict[Action, list[int]]] = defaultdict(lambda: defaultdict(list))
    for action in schedule.programs[worker]:
        for need in dependencies(action, pipeline):
            sender = pipeline.worker_of(need.stage, need.index)
            if sender != worker:
                needed[sender, need.kind][need].append(action.stage)
    return {
        channel: deque(
            (action.result, stage)
            for action in schedule.programs[channel[0]]
            if action.result in readers
            for stage in sorted(readers[action.result])
        )
        for channel, readers in needed.items()
    }
