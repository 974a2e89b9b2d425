"""A complete recipe: learning rate with warm-up and steps, clipping, bf16, evaluation with a metric, early stopping."""

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from penstock import EarlyStop, Job


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def no_decay_for_vectors(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    matrices, vectors = [p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3)


def warm_up_then_steps(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    return lr_scheduler.ChainedScheduler([warm_up, lr_scheduler.StepLR(optimizer, 30, gamma=0.1)])


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    images = torch.randn(1200, 1, 8, 8)
    labels = images[:, 0, :2, :5].flatten(1).argmax(1)  # a rule that the model can learn
    return Job(
        model=model,
        data=TensorDataset(images[:1000], labels[:1000]),
        evaluation=TensorDataset(images[1000:], labels[1000:]),
        metrics={"accuracy": accuracy},
        early_stop=EarlyStop(metric="accuracy", mode="max", patience=3),
        loss=nn.functional.cross_entropy,
        optimizer=no_decay_for_vectors,
        scheduler=warm_up_then_steps,
        scheduler_steps="epoch",
        clip_norm=1.0,
        precision="bf16",
        batch_size=40,
        epochs=20,
    )
