"""The smallest job: model, data, loss and optimizer. Replace them by your own; the data here is random."""

import torch
from torch import nn

from penstock import Job


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip
    images, labels = torch.randn(3200, 1, 28, 28), torch.randint(0, 10, (3200,))
    return Job(
        model=model,
        data=torch.utils.data.TensorDataset(images, labels),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=16,
    )
