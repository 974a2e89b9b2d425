"""Plays a plan's actions with its costs: throughput, waiting and memory before anything runs."""

from penstock.simulate.conditions import CALM, Conditions, Episode, Stragglers, parse_conditions
from penstock.simulate.explain import Explanation, explain
from penstock.simulate.simulation import LinkLoad, Simulation, play, simulate
from penstock.simulate.verdict import Verdict, verdict_of
from penstock.simulate.what_if import what_if

__all__ = [
    "CALM",
    "Conditions",
    "Episode",
    "Explanation",
    "LinkLoad",
    "Simulation",
    "Stragglers",
    "Verdict",
    "explain",
    "parse_conditions",
    "play",
    "simulate",
    "verdict_of",
    "what_if",
]
