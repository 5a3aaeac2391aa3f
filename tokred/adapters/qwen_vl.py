"""Qwen2-VL and Qwen2.5-VL: images and videos of any size, merged 2x2 after the tower, M-RoPE positions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

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

QWEN2_VL = ModelAdapter(model_type="qwen2_vl", media=_MEDIA, cells=_cells)
QWEN2_5_VL = ModelAdapter(model_type="qwen2_5_vl", media=_MEDIA, cells=_cells)
