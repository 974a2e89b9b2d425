"""What a user may ask of a plan besides speed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import FormatError, PlanError
from penstock.graph import LayerGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    replicas: tuple[int, ...] = ()
    """Replicas of each stage, first to last. Empty leaves them to the planner."""
    pins: tuple[tuple[str, int], ...] = ()
    """A layer, by name or id, and the stage that it must be in."""
    together: tuple[tuple[str, str], ...] = ()
    """Two layers that no cut may separate."""
    straight: bool = False
    """Whether every stage has one replica."""
    most_stages: int | None = None

    def __post_init__(self) -> None:
        if any(count < 1 for count in self.replicas):
            raise PlanError(f"replicas {list(self.replicas)}: every stage has at least one")
        if self.most_stages is not None and self.most_stages < 1:
            raise PlanError(f"at most {self.most_stages} stages; a plan has at least one")
        if self.most_stages is not None and len(self.replicas) > self.most_stages:
            raise PlanError(f"{len(self.replicas)} stages are asked for, and at most {self.most_stages}; drop one hint")
        if self.straight and any(count > 1 for count in self.replicas):
            raise PlanError(f"replicas {list(self.replicas)} and a straight pipeline contradict each other; drop one")

    def without_each(self) -> dict[str, Hints]:
        """For each hint, as written on the command line, all the other hints."""
        found = {}
        if self.replicas:
            found[f"--replicas {'-'.join(map(str, self.replicas))}"] = replace(self, replicas=())
        for at, (layer, stage) in enumerate(self.pins):
            found[f"--pin {layer}={stage}"] = replace(self, pins=self.pins[:at] + self.pins[at + 1 :])
        for at, (first, second) in enumerate(self.together):
            found[f"--no-cut {first}={second}"] = replace(self, together=self.together[:at] + self.together[at + 1 :])
        if self.straight:
            found["--straight"] = replace(self, straight=False)
        if self.most_stages is not None:
            found[f"--most-stages {self.most_stages}"] = replace(self, most_stages=None)
        return found

    @property
    def num_stages(self) -> int | None:
        return len(self.replicas) or None

    def sizes(self, stages_behind: int, devices: int, total: int | None) -> Sequence[int]:
        """How many devices the stage with so many downstream stages may have, in a pipeline of ``total`` stages if
        known."""
        if self.most_stages is not None and stages_behind >= self.most_stages:
            return ()
        if total is not None and stages_behind >= total:
            return ()
        if self.replicas:
            return (self.replicas[len(self.replicas) - 1 - stages_behind],)
        return (1,) if self.straight else range(1, devices + 1)

    def allow(self, replicas: Sequence[int], stage_of_layer: dict[int, int], graph: LayerGraph) -> bool:
        """Whether a pipeline satisfies all hints."""
        if self.replicas and tuple(replicas) != self.replicas:
            return False
        if self.straight and max(replicas) > 1:
            return False
        if self.most_stages is not None and len(replicas) > self.most_stages:
            return False
        pinned = all(stage_of_layer[layer] == stage for layer, stage in self.pinned_layers(graph))
        return pinned and all(stage_of_layer[a] == stage_of_layer[b] for a, b in self.layers_together(graph))

    def pinned_layers(self, graph: LayerGraph) -> list[tuple[int, int]]:
        return [(_layer(name, graph), stage) for name, stage in self.pins]

    def layers_together(self, graph: LayerGraph) -> list[tuple[int, int]]:
        return [(_layer(first, graph), _layer(second, graph)) for first, second in self.together]


def parse_replicas(text: str) -> tuple[int, ...]:
    """``0:3,1:1`` means three replicas of stage 0 and one of stage 1, and so does ``3-1``."""
    parts = [part.strip() for part in text.split("-" if "-" in text else ",")]
    if "-" not in text and all(":" in part for part in parts):
        pairs = [part.split(":", 1) for part in parts]
        if [stage.strip() for stage, _ in pairs] != [str(i) for i in range(len(pairs))]:
            raise FormatError(f"replicas {text!r}: name every stage once, in order, such as 0:3,1:1")
        parts = [count.strip() for _, count in pairs]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise FormatError(f"replicas {text!r}: expected one count per stage, such as 0:3,1:1 or 3-1")
    return tuple(map(int, parts))


def parse_pin(text: str) -> tuple[str, int]:
    """``layer=stage``."""
    name, _, stage = text.rpartition("=")
    if not name or not stage.isdecimal():
        raise FormatError(f"pin {text!r}: expected a layer and its stage, such as encoder.embed=0")
    return name, int(stage)


def parse_no_cut(text: str) -> tuple[str, str]:
    """``layer=layer``."""
    first, _, second = text.partition("=")
    if not first or not second:
        raise FormatError(f"no cut {text!r}: expected two layers, such as conv1=bn1")
    return first, second


def _layer(name: str, graph: LayerGraph) -> int:
    """A layer by its name, or by its id if no layer has that name."""
    for layer in graph.layers:
        if layer.name == name:
            return layer.id
    if name.isdecimal() and int(name) in graph.by_id:
        return int(name)
    close = difflib.get_close_matches(name, [layer.name for layer in graph.layers], n=3)
    remedy = f"did you mean {', '.join(close)}?" if close else "`penstock show` lists the layers of a profile"
    raise PlanError(f"the model has no layer {name!r}; {remedy}")
