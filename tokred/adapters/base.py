"""What tokred has to know about a model family, and about the versions of transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..method import ModelShape, Need

# The argument that carries the cache: its name since transformers 5.24, and the one before.
CACHE_ARGUMENTS = ("cache", "past_key_values")

# Arguments of decoders and decoder layers that tokred moves or that have no sequence axis. Any other tensor with an
# axis of the sequence's length is refused.
DECODER_ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "hidden_states",
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        *CACHE_ARGUMENTS,
    }
)


def cache_argument(function: Callable[..., Any]) -> str:
    """Return the name under which `function` takes the cache."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[0])


@functools.cache
def mask_cache_argument() -> str:
    """Return the name under which transformers' mask functions take the cache."""
    from transformers.masking_utils import create_causal_mask

    return cache_argument(create_causal_mask)


def decoder_needs() -> frozenset[Need]:
    """The observations that every decoder of attention layers and gated FFNs provides."""
    return frozenset(
        {
            Need.LAST_ROW,
            Need.NEXT_ROW,
            Need.TEXT_ROWS,
            Need.LAYER_KEYS,
            Need.ACTIVE_NEURONS,
            Need.EMBEDDINGS,
            Need.NORMED_HIDDEN,
            Need.TEXT,
        }
    )


Cells = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Media:
    """One kind of media that a family takes.

    Args:
        token_id: name of the config entry with the placeholder's id.
        type_id: its value in `mm_token_type_ids`.
        encode: name of the base model's method that encodes it.
        grid: name of the encoder's argument that holds the grids or sizes of the items, if there is one.
    """

    token_id: str
    type_id: int
    encode: str
    grid: str | None = None


@dataclass(frozen=True)
class ModelAdapter:
    """Where the parts of a family's stock model are, and what they provide.

    Paths are relative to the base model (`model.model`).

    Args:
        model_type: `config.model_type` of the family.
        media: the media that it takes, by modality.
        decoder: path of the language model, which has `layers` and `norm`.
        attention: path of the attention module inside a decoder layer.
        ffn: path of the module inside a decoder layer that takes the activation of a gated FFN, act(gate) * up; None if
            the layers have none.
        cells: returns, for the base config, a modality, the encoder's grid argument and the items' lengths, what
            `MediaItem.cells` wants of each item.
        projector: path of a projector that treats every token alone, so that tokens can leave before it.
        tower_layers: path of the list of tower blocks.
        tower_attention: path of the attention module inside a tower block.
        feature_layer: returns the tower block whose output is the feature, for the base config.
        tower_needs: returns what the tower provides, for the base config.
        tile_cells: returns the cells of what the projector takes for one tile, for the base config.
        merged_patches: returns how many patches the tower merges into one token, for the base config.
        tower_order: returns the token of each place in the tower's output, for the base config and the encoder's grid
            argument; None if tokens come out in the order of the prompt.
    """

    model_type: str
    media: dict[str, Media] = field(hash=False)
    cells: Callable[[Any, str, Any, Sequence[int]], list[Cells | None]]
    decoder: str = "language_model"
    attention: str = "self_attn"
    ffn: str | None = "mlp.down_proj"
    projector: str | None = None
    tower_layers: str | None = None
    tower_attention: str = "self_attn"
    feature_layer: Callable[[Any], int] | None = None
    tower_needs: Callable[[Any], frozenset[Need]] = lambda config: frozenset()
    tile_cells: Callable[[Any], torch.Tensor] | None = None
    merged_patches: Callable[[Any], int] | None = None
    tower_order: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def base(self, model: nn.Module) -> nn.Module:
        """Return the base model, which encodes media and calls the language model."""
        base = model._modules.get("model", model)
        return base if base is not None else model

    def shape(self, base: nn.Module) -> ModelShape:
        """Return the sizes of a base model."""
        decoder: Any = base.get_submodule(self.decoder)
        tower: Any = () if self.tower_layers is None else base.get_submodule(self.tower_layers)
        config: Any = base.config
        features = None
        if self.feature_layer is not None and Need.TOWER_KEYS in self.provides(config):
            features = self.feature_layer(config) + 1
        return ModelShape(len(decoder.layers), len(tower), self.projector is not None, features)

    def provides(self, config: Any) -> frozenset[Need]:
        """Return the observations that a model with this config can serve."""
        missing = frozenset({Need.ACTIVE_NEURONS} if self.ffn is None else ())
        return (decoder_needs() - missing) | self.tower_needs(config)


def grid_cells(frames: int, rows: int, columns: int) -> torch.Tensor:
    """Return frame, view, row and column of the cells of a grid in raster order, int64 (frames * rows * columns, 4)."""
    frame, row, column = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([frame, torch.zeros_like(frame), row, column], dim=-1).view(-1, 4)
