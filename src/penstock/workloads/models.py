"""Small models of the common shapes, written as anybody would: nothing in them knows of Penstock."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block, normalised before attention and before the feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        wide = F.gelu(self.widen(self.norm_2(x)))
        return torch.add(x, self.narrow(wide))


class CharacterModel(nn.Module):
    """A language model over characters."""

    def __init__(self, alphabet: int, width: int = 128, heads: int = 4, blocks: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embed(characters) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def small_vgg(classes: int = 10, widths: tuple[int, ...] = (64, 128, 256, 512)) -> nn.Sequential:
    """A VGG-like net for 32 x 32 images: 7.5 M parameters, two convolutions per width."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    size = 32 // 2 ** len(widths)
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels * size * size, 1280),
        nn.ReLU(inplace=True),
        nn.Linear(1280, classes),
    )


def vgg11(classes: int = 10) -> nn.Sequential:
    """VGG-11 for 32 x 32 images, with the classifier of the original: 28 M parameters, most of them in its end."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, classes),
    )
