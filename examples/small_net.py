"""A job: model, data, loss, optimizer. Put yours in their place; the data here is only random numbers."""

import torch
from torch import nn

from penstock import Job


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    images, labels = torch.randn(2000, 1, 8, 8), torch.randint(0, 10, (2000,))
    return Job(
        model=model,
        data=torch.utils.data.TensorDataset(images, labels),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=32,
    )
