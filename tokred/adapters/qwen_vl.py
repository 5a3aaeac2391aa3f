"""Qwen2-VL and Qwen2.5-VL: images and videos of any size, merged 2x2 after the tower, M-RoPE positions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..method import Need
from .base import Cells, Media, ModelAdapter, grid_cells


def _cells(config: Any, modality: str, grid: Any, lengths: Sequence[int]) -> list[Cells | None]:
    if grid is None:
        return [None] * len(lengths)
    merge = config.vision_config.spatial_merge_size
    return [
        partial(grid_cells, frames, rows // merge, columns // merge)
        for frames, rows, columns in torch.as_tensor(grid).tolist()
    ]


_MEDIA = {
    "image": Media("image_token_id", 1, "get_image_features", grid="image_grid_thw"),
    "video": Media("video_token_id", 2, "get_video_features", grid="video_grid_thw"),
}


def _tower_needs(config: Any) -> frozenset[Need]:
    return frozenset({Need.COLUMN_SUM, Need.GRID})


def _window_order(config: Any, grid: torch.Tensor) -> torch.Tensor:
    """Return the tokens in the order of the tower's windows, int64."""
    from transformers.vision_utils import get_vision_window_index

    vision = config.vision_config
    order, _ = get_vision_window_index(grid, vision.spatial_merge_size, vision.window_size, vision.patch_size)
    return order


QWEN2_VL = ModelAdapter(
    model_type="qwen2_vl",
    media=_MEDIA,
    cells=_cells,
    tower_layers="visual.blocks",
    tower_attention="attn",
    feature_layer=lambda config: config.vision_config.depth - 1,
    tower_needs=_tower_needs,
    merged_patches=lambda config: config.vision_config.spatial_merge_size**2,
)
QWEN2_5_VL = replace(QWEN2_VL, model_type="qwen2_5_vl", tower_order=_window_order)
