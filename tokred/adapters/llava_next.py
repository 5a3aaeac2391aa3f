"""LLaVA-NeXT: the whole image, then its tiles joined row by row, without padding and with a newline after each row."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .base import Cells, Media, ModelAdapter, grid_cells
from .llava import feature_layer, tile_cells, tower_needs


def _packed_cells(config: Any, height: int, width: int, length: int) -> torch.Tensor:
    """Return the cells of one packed image: the whole image as view 0, the joined tiles as view 1."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    side = config.vision_config.image_size // config.vision_config.patch_size
    base = grid_cells(1, side, side)
    if length == side * side + 1:
        return torch.cat([base, torch.tensor([[0, 0, -1, -1]])])
    tile_rows, tile_columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    joined = grid_cells(1, tile_rows * side, tile_columns * side).view(tile_rows * side, tile_columns * side, 4)
    cut = unpad_image(joined.permute(2, 0, 1), (height, width)).permute(1, 2, 0).clone()
    cut[..., 1] = 1
    newline = torch.tensor([0, 1, -1, -1]).expand(cut.shape[0], 1, 4)
    return torch.cat([base, torch.cat([cut, newline], dim=1).reshape(-1, 4)])


def _cells(config: Any, modality: str, grid: Any, lengths: Sequence[int]) -> list[Cells | None]:
    if grid is None:
        return [None] * len(lengths)
    sizes = torch.as_tensor(grid).tolist()
    return [
        partial(_packed_cells, config, int(height), int(width), length)
        for (height, width), length in zip(sizes, lengths, strict=True)
    ]


LLAVA_NEXT = ModelAdapter(
    model_type="llava_next",
    media={"image": Media("image_token_id", 1, "get_image_features", grid="image_sizes")},
    cells=_cells,
    projector="multi_modal_projector",
    tower_layers="vision_tower.encoder.layers",
    feature_layer=feature_layer,
    tower_needs=tower_needs,
    tile_cells=tile_cells,
)
