"""Plays a plan's actions with its costs: throughput, waiting and memory before anything runs."""

from penstock.simulate.conditions import CALM, Conditions, Episode, Stragglers, parse_conditions
from penstock.simulate.explain import Explanation, explain
from penstock.simulate.headline import headline
from penstock.simulate.memory import Curve
from penstock.simulate.simulation import LinkLoad, Simulation, play, simulate
from penstock.simulate.verdict import Verdict, verdict_of
from penstock.simulate.what_if import what_if

__all__ = [
    "CALM",
    "Conditions",
    "Curve",
    "Episode",
    "Explanation",
    "LinkLoad",
    "Simulation",
    "Stragglers",
    "Verdict",
    "explain",
    "headline",
    "parse_conditions",
    "play",
    "simulate",
    "verdict_of",
    "what_if",
]
