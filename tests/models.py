"""Small models, one for each thing that a cut can get wrong, and jobs around them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Job
from penstock.workloads.transformers import import_transformers


class Scale(nn.Module):
    """Multiplies by a weight: autograd saves the parameter itself, as convolution and layer norm do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Tied(nn.Module):
    """Embedding and head share a weight; a value of the first layers is read again by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        early = self.embed(x)
        h = torch.tanh(self.first(early))
        h = h + torch.tanh(self.second(self.norm(h)))
        return self.head(h + early)


class Branches(nn.Module):
    """By name in, a dict out; a value read by several stages; an integer tensor that travels."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = torch.relu_(self.a(x))
        top = h.argmax(dim=1)
        g = torch.relu(self.b(h)) * mask
        g = g + self.c(h + g)
        g = g + F.one_hot(top, 6)
        return {"logits": self.out(g), "hidden": h}


class Undecided(nn.Module):
    """Its control flow depends on the data: neither export nor fx can see through it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.detach().sum()) > 0 else self.linear(-x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (_, cell) = self.lstm(x)
        return self.head(hidden[:, -1] + cell[0])


class Translator(nn.Module):
    """As GNMT: a bidirectional layer first, residuals further on, an attention that feeds every decoder layer."""

    def __init__(self, words: int = 20, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.source = nn.Embedding(words, width)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        widths = [2 * width, *[width] * (layers - 2)]
        self.encoder = nn.ModuleList(nn.LSTM(each, width, batch_first=True) for each in widths)
        self.target = nn.Embedding(words, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.words = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        memory, _ = self.both_ways(self.source(source))
        for index, layer in enumerate(self.encoder):
            made, _ = layer(memory)
            memory = made + memory if index > 0 else made
        hidden, _ = self.first(self.target(target))
        scores = self.score(torch.tanh(self.query(hidden)[:, :, None] + self.key(memory)[:, None])).squeeze(-1)
        weights = scores.masked_fill((source == 0)[:, None], -1e9).softmax(dim=-1)
        context = weights @ memory
        for index, layer in enumerate(self.decoder):
            made, _ = layer(torch.cat([hidden, context], dim=-1))
            hidden = made + hidden if index > 0 else made
        return self.words(hidden), {"attention": weights}


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.LayerNorm(64),
        Scale(64),
        nn.Linear(64, 4),
    )


def noisy() -> nn.Sequential:
    """What a second forward must not do twice: statistics of batch norm, random numbers, writing into its input."""
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.Dropout2d(0.25, inplace=True),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )


class Transformer(nn.Module):
    """Two encoder layers as torch has them, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def undecided() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Undecided(), nn.Tanh(), nn.Linear(6, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def make_job(name: str, samples: int = 11, batch_size: int = 4, epochs: int = 1) -> Job:
    """The same job every time: same weights, same data."""
    torch.manual_seed(0)
    model, data, loss = MODELS[name](samples)
    return Job(model=model, data=data, loss=loss, optimizer=sgd, batch_size=batch_size, epochs=epochs)


def _labels(samples: int) -> Tensor:
    return torch.randint(0, 4, (samples,))


def _conv(samples: int) -> tuple[nn.Module, Any, Any]:
    return convolutional(), list(zip(torch.randn(samples, 1, 4, 4), _labels(samples), strict=True)), F.cross_entropy


def _noisy(samples: int) -> tuple[nn.Module, Any, Any]:
    return noisy(), list(zip(torch.randn(samples, 1, 4, 4), _labels(samples), strict=True)), F.cross_entropy


def _tied(samples: int) -> tuple[nn.Module, Any, Any]:
    return _of_tokens(Tied(), samples)


def _transformer(samples: int) -> tuple[nn.Module, Any, Any]:
    return _of_tokens(Transformer(), samples)


def _of_tokens(model: nn.Module, samples: int) -> tuple[nn.Module, Any, Any]:
    tokens = torch.randint(0, 20, (samples, 5))
    return model, list(zip(tokens, tokens, strict=True)), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())


def _branches(samples: int) -> tuple[nn.Module, Any, Any]:
    inputs = [{"x": x, "mask": m} for x, m in zip(torch.randn(samples, 6), torch.rand(samples, 6).round(), strict=True)]

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target) + 0.1 * output["hidden"].square().mean()

    return Branches(), list(zip(inputs, _labels(samples), strict=True)), loss


def _undecided(samples: int) -> tuple[nn.Module, Any, Any]:
    return undecided(), list(zip(torch.randn(samples, 6), _labels(samples), strict=True)), F.cross_entropy


def _recurrent(samples: int) -> tuple[nn.Module, Any, Any]:
    return Recurrent(), list(zip(torch.randn(samples, 3, 6), _labels(samples), strict=True)), F.cross_entropy


def _translator(samples: int) -> tuple[nn.Module, Any, Any]:
    source, target = torch.randint(0, 20, (samples, 6)), torch.randint(0, 20, (samples, 5))
    inputs = list(zip(source, target[:, :-1], strict=True))

    def loss(output: tuple[Tensor, Any], wanted: Tensor) -> Tensor:
        return F.cross_entropy(output[0].flatten(0, 1), wanted.flatten())

    return Translator(), list(zip(inputs, target[:, 1:], strict=True)), loss


MODELS: dict[str, Callable[[int], tuple[nn.Module, Any, Any]]] = {
    "conv": _conv,
    "tied": _tied,
    "branches": _branches,
    "undecided": _undecided,
    "recurrent": _recurrent,
    "noisy": _noisy,
    "transformer": _transformer,
    "translator": _translator,
}


def save_tiny_gpt2(directory: Path) -> None:
    """A checkpoint as Hugging Face's models save it. Skips the test where transformers is not installed."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed; pip install '.[dev]'")
    transformers = import_transformers()
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
