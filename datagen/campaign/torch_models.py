"""Models in plain PyTorch, for hosts without timm and transformers.

Each function without arguments creates a model of RGB images, so that tables of models can name it:
library ``opcast.datagen.campaign.torch_models``, model ``resnet50``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class _Bottleneck(nn.Module):  # type: ignore[misc]
    def __init__(self, cin: int, inner: int, stride: int, groups: int) -> None:
        super().__init__()
        cout = 4 * inner
        self.a = nn.Sequential(nn.Conv2d(cin, inner, 1, bias=False), nn.BatchNorm2d(inner))
        self.b = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
        )
        self.c = nn.Sequential(nn.Conv2d(inner, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.skip = nn.Sequential()
        if stride > 1 or cin != cout:
            self.skip = nn.Sequential(
                nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return torch.relu(self.c(y) + self.skip(x))


def _resnet(depths: Sequence[int], groups: int = 1) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    cin = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            inner = 64 * 2**stage
            layers.append(_Bottleneck(cin, inner, 2 if stage and not block else 1, groups))
            cin = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 1000)]
    return nn.Sequential(*layers)


# ResNets with bottlenecks, and one whose 3 x 3 convolutions have 32 groups.
resnet26, resnet50 = partial(_resnet, (2, 2, 2, 2)), partial(_resnet, (3, 4, 6, 3))
resnet101, resnext50 = partial(_resnet, (3, 4, 23, 3)), partial(_resnet, (3, 4, 6, 3), groups=32)


class _ViT(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        # The patches of an image of 224 x 224 pixels, and the class token.
        self.place = nn.Parameter(torch.zeros(1, 14 * 14 + 1, width))
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


# ViT-Ti/16, ViT-B/16 and ViT-L/16.
vit_tiny, vit_base = partial(_ViT, 192, 3, 12), partial(_ViT, 768, 12, 12)
vit_large = partial(_ViT, 1024, 16, 24)


class _ConvNeXtBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    """A network like ConvNeXt-T: depthwise convolutions, layer norms and linear layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
    for stage, depth in enumerate((3, 3, 9, 3)):
        width = 96 * 2**stage
        if stage:
            layers.append(nn.Conv2d(width // 2, width, 2, 2))
        layers += [_ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000))


def vgg16() -> nn.Module:
    """VGG-16."""
    layers: list[nn.Module] = []
    cin = 3
    for depth, cout in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU(inplace=True)]
            cin = cout
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, 1000)
    )


def small_cnn() -> nn.Module:
    """A few convolutions, for rehearsals."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
