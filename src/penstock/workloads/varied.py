"""Small models of various shapes: residual, with skips across the net, with experts chosen by the data, recurrent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """For 32 x 32 images: batch norm, and widths that double where the image halves."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (32, 64, 128, 256), blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        made, channels = [], widths[0]
        for width in widths:
            for _ in range(blocks):
                made.append(ResidualBlock(channels, width, 1 if width == channels else 2))
                channels = width
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


def _double_convolution(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()),
    )


class SmallUNet(nn.Module):
    """Down and up again, with a skip from each size on the way down to the same size on the way up."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double_convolution(*pair) for pair in zip([1, *widths[:-2]], widths[:-1], strict=True)
        )
        self.middle = _double_convolution(widths[-2], widths[-1])
        self.up = nn.ModuleList(
            _double_convolution(widths[level] + widths[level + 1], widths[level]) for level in reversed(range(depth))
        )
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        result: Tensor = self.out(x)
        return result


class Experts(nn.Module):
    """Sends each sample through the one expert that a gate chooses; which, only the data tell."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + mixed


def mixture_of_experts(
    features: int = 32, width: int = 64, layers: int = 4, experts: int = 4, classes: int = 10
) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), *(Experts(width, experts) for _ in range(layers)), nn.Linear(width, classes)
    )


class RecurrentLanguageModel(nn.Module):
    """LSTM layers one over the other."""

    def __init__(self, words: int = 500, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        scores: Tensor = self.head(x)
        return scores
