"""Fine-tunes a Hugging Face model from a local checkpoint: a directory that `save_pretrained` wrote.

Nothing is downloaded. Replace the directory and the data by your own; the tokens here are random.
"""

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from penstock import Job

CHECKPOINT = "checkpoint"
LENGTH = 32


def next_token_loss(output, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def job() -> Job:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True)
    tokens = torch.randint(0, model.config.vocab_size, (256, LENGTH))
    return Job(
        model=model,
        data=[({"input_ids": row}, row) for row in tokens],  # inputs by name, and the target
        loss=next_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-5),
        batch_size=8,
    )
