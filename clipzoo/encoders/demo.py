"""Small image tower that learns the demo world on two CPU cores in minutes."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import Tower
from clipzoo.types import Count, Features, MultipleOf, checked


@checked
class DemoImageTower(Tower):
    """Four strided convolutions with residual convolutions between them, one transformer block, maximum over positions.

    Instance norm makes shapes learnable in few steps, but removes the amount of every colour: a second path adds the
    coarse colours of the image. Tokens: the positions of the last feature map, M = (image_size / 16)^2.
    image_size: H = W. width: width of the tokens. heads: number of heads of the transformer block.
    """

    relations = {"width % heads == 0": "width must be a multiple of heads"}
    derived = {"tokens": "(image_size // 16) ** 2"}

    def __init__(
        self, image_size: Annotated[Count, MultipleOf(16)], width: Annotated[Count, MultipleOf(8)], heads: Count
    ) -> None:
        super().__init__()
        self.width = width
        narrow, middle, wide = width // 8, width // 4, width // 2
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, narrow, 5, stride=2, padding=2), *_normalised(narrow),
            nn.Conv2d(narrow, middle, 3, stride=2, padding=1), Residual(middle), Residual(middle), *_normalised(middle),
            nn.Conv2d(middle, wide, 3, stride=2, padding=1), Residual(wide), Residual(wide), *_normalised(wide),
            nn.Conv2d(wide, width, 3, stride=2, padding=1),
        )  # fmt: skip
        self.colours = nn.Sequential(nn.AvgPool2d(8), nn.Conv2d(3, width, 2, stride=2))
        self.positions = nn.Parameter(torch.randn((image_size // 16) ** 2, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)

        # Residual branches are scaled by 1/2; the colour path keeps its smaller default and does not dominate shapes.
        for module in self.convolutions.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        residuals = [module.path[-1] for module in self.convolutions if isinstance(module, Residual)]
        with torch.no_grad():
            for layer in (*residuals, self.block.self_attn.out_proj, self.block.linear2):
                layer.weight.mul_(0.5)  # type: ignore[operator, union-attr]

    def forward(self, image: Tensor) -> Features:
        image = image.contiguous(memory_format=torch.channels_last)
        maps = self.convolutions(image) + self.colours(image)  # [b, w, S / 16, S / 16]
        tokens = self.norm(self.block(maps.flatten(2).mT + self.positions))
        return Features(tokens.amax(dim=1), tokens)

    def layers(self) -> list[nn.Module]:
        return [*self.convolutions, self.block]


class Residual(nn.Module):
    """x + conv(relu(norm(x)))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*_normalised(channels), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.path(maps)


def _normalised(channels: int) -> tuple[nn.Module, nn.Module]:
    # One group per channel is instance norm with learned scale and shift.
    return nn.GroupNorm(channels, channels), nn.ReLU()
