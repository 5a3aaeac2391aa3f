"""LLaVA 1.5: a CLIP tower, a projector that treats every token alone, one square grid per image."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..method import TOWER_NEEDS, Need
from .base import Cells, Media, ModelAdapter, grid_cells


def feature_layer(config: Any) -> int:
    """Return the tower block whose output is the image feature (`vision_feature_layer` counts the embedding as 0)."""
    index = config.vision_feature_layer
    return index - 1 if index > 0 else config.vision_config.num_hidden_layers + index


def tower_needs(config: Any) -> frozenset[Need]:
    """Return what a CLIP tower provides when one layer is the feature and its CLS token is cut off."""
    plain = isinstance(config.vision_feature_layer, int) and config.vision_feature_select_strategy == "default"
    if not plain or config.vision_config.model_type != "clip_vision_model":
        return frozenset()
    return TOWER_NEEDS | {Need.GRID}


def tile_cells(config: Any) -> torch.Tensor:
    """Return the cells of the patches of one tile."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return grid_cells(1, side, side)


def _cells(config: Any, modality: str, grid: Any, lengths: Sequence[int]) -> list[Cells | None]:
    sides = [math.isqrt(length) for length in lengths]
    return [
        partial(grid_cells, 1, side, side) if side * side == length else None
        for side, length in zip(sides, lengths, strict=True)
    ]


LLAVA = ModelAdapter(
    model_type="llava",
    media={"image": Media("image_token_id", 1, "get_image_features")},
    cells=_cells,
    projector="multi_modal_projector",
    tower_layers="vision_tower.encoder.layers",
    feature_layer=feature_layer,
    tower_needs=tower_needs,
    tile_cells=tile_cells,
)
