"""The texts of a drawing: of rows, of what stages send, and of the stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from unicodedata import east_asian_width

from penstock.graph import Layer
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.report.drawing.blocks import Row
from penstock.report.drawing.folds import Fold
from penstock.report.stages import bottleneck_text, show_memory
from penstock.units import show_bytes, show_numbers, show_seconds

MOST_KIND_PX, MOST_ROW_PX, MOST_FACT_PX = 130.0, 210.0, 122.0
MOST_NAMES, MOST_TOOLTIP = 12, 300
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def text_width_px(text: str) -> float:
    """Width of a text at the drawing's size in a wide font, since the font is not known when a picture is laid out."""
    return sum(map(_character_px, text))


def _character_px(character: str) -> float:
    if character in "ijl.,:;|!'` ":
        return 3.6
    if character in "mwMW@%" or character == ELLIPSIS:
        return 10.6
    if east_asian_width(character) in "WF":
        return 12.0
    return 7.6 if character.isupper() else 6.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLabel:
    layers: Row
    text: str
    name: str
    """Shown next to the text: the name of the only layer, or what the names of several have in common."""
    seconds: float
    """Forward and backward on the stage's slowest replica."""
    tooltip: str

    @property
    def seconds_text(self) -> str:
        return show_seconds(self.seconds) if self.seconds else ""

    @property
    def width_px(self) -> float:
        words = [word for word in (self.text, self.name, self.seconds_text) if word]
        return sum(map(text_width_px, words)) + 9 * (len(words) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldLabel:
    """The text above the rows of equal blocks that are drawn as one."""

    text: str
    times: str
    tooltip: str

    @property
    def width_px(self) -> float:
        return text_width_px(self.text) + text_width_px(self.times) + 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLabel:
    text: str
    num_bytes: float
    slow: bool
    """Whether it crosses the cut that is the plan's bottleneck."""
    tooltip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLabel:
    title: str
    alarm: str
    """Not empty if the stage, or the cut after it, is the plan's bottleneck."""
    facts: tuple[str, ...]
    tooltip: str

    @property
    def lines(self) -> int:
        return 1 + bool(self.alarm) + len(self.facts)


class Labels:
    """Labels for parts of one plan, with numbers of its cost model."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._costs = PlanCosts(plan)
        self._stage_layers = [frozenset(stage.layers) for stage in plan.stages]
        self._all_layers = frozenset(plan.stage_of_layer)
        self._slow = self._costs.bottleneck()

    def row(self, row: Row, fold: Fold | None = None) -> RowLabel:
        """If ``row`` has the layers of several equal blocks, the figures are those of one block and times are means."""
        model, stage, times = self._costs.model, self._plan.stage_of_layer[row[0]], len(fold.blocks) if fold else 1
        forward_s, backward_s = (seconds / times for seconds in self._costs.layers_s(stage, row))
        one = row[: len(row) // times]
        sent_bytes = model.forward_bytes(frozenset(one), self._all_layers.difference(one))
        layers = [self._plan.profile.graph.by_id[layer] for layer in one]
        within = dict(zip(fold.blocks[0], fold.layer_names, strict=True)) if fold else {}
        text, name = _in_short(layers, [within.get(layer.id, layer.name) for layer in layers])
        tooltip = (
            *self._in_full(layers),
            *([f"and the same in {times - 1} more; of one, in the mean:"] if fold else []),
            f"stage {stage}: forward {show_seconds(forward_s)}, backward {show_seconds(backward_s)}",
            f"parameters {show_bytes(model.parameter_bytes(one))}",
            f"output {show_bytes(sent_bytes)} per microbatch",
        )
        return RowLabel(layers=row, text=text, name=name, seconds=forward_s + backward_s, tooltip="\n".join(tooltip))

    def fold(self, fold: Fold) -> FoldLabel:
        stage, times = self._plan.stage_of_layer[fold.layers[0]], len(fold.blocks)
        seconds = [show_seconds(each) for each in self._costs.layers_s(stage, fold.layers)]
        parameters = show_bytes(self._costs.model.parameter_bytes(fold.layers))
        tooltip = (
            f"{fold.name}: {times} equal blocks of {len(fold.layer_names)} layers"[:MOST_TOOLTIP],
            f"stage {stage}: forward {seconds[0]}, backward {seconds[1]} of all together",
            f"parameters {parameters}",
        )
        text = _tail(fold.name, MOST_ROW_PX)
        return FoldLabel(text=text, times=f"\N{MULTIPLICATION SIGN} {times}", tooltip="\n".join(tooltip))

    def _in_full(self, layers: Sequence[Layer]) -> tuple[str, ...]:
        first, last = layers[0], layers[-1]
        if len(layers) == 1:
            return (f"{first.name}: {first.kind}"[:MOST_TOOLTIP],)
        return f"{len(layers)} layers: {first.name} .. {last.name}", self._names([layer.id for layer in layers])

    def _names(self, layers: Sequence[int]) -> str:
        names = [self._plan.profile.graph.by_id[layer].name for layer in layers[:MOST_NAMES]]
        more = len(layers) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def delivery(self, layers: Sequence[int], target: int) -> DeliveryLabel:
        """What these layers of one stage send to a later one."""
        senders, receivers = frozenset(layers), self._stage_layers[target]
        num_bytes = self._costs.sent_bytes(senders, receivers)
        source, amount = self._plan.stage_of_layer[layers[0]], show_bytes(num_bytes)
        sends = self._plan.stages[source].sends
        how = "" if sends == "exact" else f" in {sends}"
        values = self._plan.profile.graph.crossing(senders, receivers)
        names = self._names(list(dict.fromkeys(value.producer for value in values)))
        return DeliveryLabel(
            text=amount,
            num_bytes=num_bytes,
            slow=source <= self._slow[0] < self._slow[1] <= target,
            tooltip=f"stage {source} sends {amount} per microbatch to stage {target}{how}\nfrom {names}",
        )

    def stage(self, index: int) -> StageLabel:
        costs, stage = self._costs, self._plan.stages[index]
        load, memory = show_seconds(costs.stage_s(index)), show_memory(costs, index)
        devices = ("device " if len(stage.devices) == 1 else "devices ") + show_numbers(stage.devices)
        layers = f"{len(stage.layers)} layer" + "s" * (len(stage.layers) > 1)
        tooltip = (
            f"stage {index}: {layers} on {devices}",
            f"{load} per microbatch, its updates and averaging included",
            f"{stage.in_flight} in flight, memory {memory}",
            f"receives {show_bytes(costs.input_bytes(index))} and sends {show_bytes(costs.output_bytes(index))} "
            "per microbatch",
            *(["computes its forward again for the backward"] if stage.recompute else []),
        )
        return StageLabel(
            title=f"Stage {index}",
            alarm=bottleneck_text(costs, index),
            facts=(_head(devices, MOST_FACT_PX), layers, f"{load}/microbatch", f"memory {memory}"),
            tooltip="\n".join(tooltip),
        )


def _in_short(layers: Sequence[Layer], names: Sequence[str]) -> tuple[str, str]:
    """The text of a row and the name next to it."""
    kinds = [_short_kind(layer) for layer in layers]
    listed = ", ".join(kinds)
    if len(layers) == 1:
        text = _head(listed, MOST_KIND_PX)
        name = names[0] if names[0] != listed else ""
    else:
        few = len(layers) <= 3 and text_width_px(listed) <= MOST_ROW_PX
        first, last = (_head(kind, MOST_ROW_PX / 3) for kind in (kinds[0], kinds[-1]))
        text = listed if few else f"{len(layers)} layers: {first} .. {last}"
        name = _common_scope(names)
    return text, _tail(name, MOST_ROW_PX - text_width_px(text))


def _short_kind(layer: Layer) -> str:
    """The kind without the module's arguments, which imported kinds include."""
    return layer.kind.partition("(")[0].strip() or layer.name


def _common_scope(names: Iterable[str]) -> str:
    """The common prefix of qualified names: ``blocks.3`` for ``blocks.3.norm`` and ``blocks.3.mlp.0``."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(first for first, *_ in takewhile(lambda part: len(set(part)) == 1, parts))


def _head(text: str, most_px: float) -> str:
    if text_width_px(text) <= most_px:
        return text
    kept = sum(width <= most_px - _character_px(ELLIPSIS) for width in accumulate(map(_character_px, text)))
    return text[:kept] + ELLIPSIS if kept else ""


def _tail(text: str, most_px: float) -> str:
    """The end of a qualified name, which tells more than its beginning."""
    return _head(text[::-1], most_px)[::-1]
