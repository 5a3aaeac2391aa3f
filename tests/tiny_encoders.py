"""Tiny random image encoders, one for each family, with pictures of 64 patches."""

from __future__ import annotations

from typing import Any

import timm
import torch
from open_clip.transformer import VisionTransformer as OpenClipTower
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

SIDE, PATCH, LAYERS = 32, 4, 4
PATCHES = (SIDE // PATCH) ** 2
_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "patch_size": PATCH,
}
_SQUARE = _SIZES | {"image_size": SIDE}

# Model class, config, and number of tokens before the patches.
_TRANSFORMERS = {
    "vit": (ViTForImageClassification, lambda: ViTConfig(**_SQUARE, num_labels=5), 1),
    "deit": (DeiTModel, lambda: DeiTConfig(**_SQUARE), 2),
    "clip": (CLIPVisionModelWithProjection, lambda: CLIPVisionConfig(**_SQUARE), 1),
    "siglip": (SiglipVisionModel, lambda: SiglipVisionConfig(**_SQUARE), 0),
    "siglip2": (Siglip2VisionModel, lambda: Siglip2VisionConfig(**_SIZES, num_patches=PATCHES), 0),
    "dinov2": (Dinov2ForImageClassification, lambda: Dinov2Config(**_SQUARE, num_labels=5), 1),
    "dinov2_with_registers": (
        Dinov2WithRegistersModel,
        lambda: Dinov2WithRegistersConfig(**_SQUARE, num_register_tokens=3),
        4,
    ),
    "dinov3_vit": (DINOv3ViTModel, lambda: DINOv3ViTConfig(**_SQUARE, num_register_tokens=2), 3),
}
FAMILIES = [*_TRANSFORMERS, "timm", "open_clip"]
PREFIX = {name: prefix for name, (_, _, prefix) in _TRANSFORMERS.items()} | {"timm": 1, "open_clip": 1}


def build(family: str, attention: str = "sdpa") -> nn.Module:
    """Return the model of a family with random weights.

    Args:
        family: one of `FAMILIES`.
        attention: kernel of the models of transformers.
    """
    torch.manual_seed(0)
    if family == "timm":
        model: nn.Module = timm.models.VisionTransformer(
            img_size=SIDE, patch_size=PATCH, embed_dim=24, depth=LAYERS, num_heads=3, mlp_ratio=2, num_classes=5
        )
    elif family == "open_clip":
        model = OpenClipTower(
            image_size=SIDE, patch_size=PATCH, width=24, layers=LAYERS, heads=3, mlp_ratio=2, output_dim=8
        )
    else:
        kind, config, _ = _TRANSFORMERS[family]
        made = config()
        made._attn_implementation = attention
        model = kind(made)
    # Biases start at zero, and layer scales near it: as trained ones they should matter.
    for parameter in model.parameters():
        if parameter.dim() < 2:
            nn.init.normal_(parameter, 0.5, 0.5)
    return model.eval().requires_grad_(False)


def pictures(family: str, count: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a forward pass with random pictures."""
    generator = torch.Generator().manual_seed(seed)
    if family == "siglip2":
        patches = torch.randn(count, PATCHES, 3 * PATCH * PATCH, generator=generator)
        shapes = torch.tensor([[SIDE // PATCH] * 2]).expand(count, -1)
        mask = torch.ones(count, PATCHES, dtype=torch.long)
        return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    name = "x" if family in ("timm", "open_clip") else "pixel_values"
    return {name: torch.randn(count, 3, SIDE, SIDE, generator=generator)}


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors that a forward pass gives back."""
    result = model(**inputs)
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in result.values() if isinstance(value, torch.Tensor)]
