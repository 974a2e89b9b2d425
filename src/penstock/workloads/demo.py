"""The job of ``penstock demo``: a character-level language model of Python's own documentation."""

import torch
import torch.nn.functional as F

from penstock import Job
from penstock.workloads.models import CharacterModel
from penstock.workloads.text import PythonReference


def job() -> Job:
    text = PythonReference(length=32, samples=4800)
    return Job(
        model=CharacterModel(alphabet=len(text.alphabet), width=256, length=32),
        data=text,
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=8,
    )
