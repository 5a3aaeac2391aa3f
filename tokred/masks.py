"""Attention masks of shortened layers: one rule for padding, decoding, later turns and masks given by the user."""

from __future__ import annotations

from typing import Any

import torch

from . import cache as caches
from .adapters.base import mask_cache_argument
from .call import Call
from .errors import UnsupportedCacheError, UnsupportedInputError


class _Lengths:
    """The part of a cache that transformers asks for when it builds a mask."""

    is_compileable = False

    def __init__(self, past: int):
        self._past = past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._past + query_length, 0


def read_mask(call: Call, kwargs: dict[str, Any], embeds: torch.Tensor) -> None:
    """Sort the mask of a call into padding and a mask given in full.

    Args:
        call: the call; its cache and lengths are known.
        kwargs: the decoder's arguments.
        embeds: its embeddings, (B, L, D).

    Raises:
        UnsupportedCacheError: the masks were prepared for a static cache.
        UnsupportedInputError: the mask has another length than the tokens, or the call packs several sequences.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        raise UnsupportedCacheError(
            "masks prepared for a static or compiled cache cannot be shortened; leave `cache_implementation` at "
            "its default"
        )
    total = call.past + call.length
    if mask is None:
        positions = kwargs.get("position_ids")
        if call.cache is None and positions is not None and _is_packed(positions, embeds.shape[0]):
            raise UnsupportedInputError("packed sequences (position_ids that restart) cannot be shortened")
    elif mask.dim() == 4:
        call.mask = mask
    elif mask.shape[1] != total:
        raise UnsupportedInputError(f"attention_mask has {mask.shape[1]} columns for {total} tokens")
    else:
        valid = mask.to(embeds.device, torch.bool)
        call.valid = None if valid.all() else valid


def layer_mask(
    call: Call, config: Any, index: int, hidden: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the mask of a layer, stock's for the unpruned sequence at the keys and queries that are there, and which
    of these keys are valid, bool of shape (B, K), None for all.

    Args:
        call: the running call.
        config: config of the decoder.
        index: the layer.
        hidden: what the layer receives, (B, P, D).
    """
    layer = caches.layer_of(call.cache, index)
    reduced = layer if isinstance(layer, caches.ReducedMixin) else None
    past = reduced.physical_length if reduced else 0 if layer is None else layer.get_seq_length()
    key = (reduced.segments if reduced else (), past, call.segment, hidden.shape[1])
    if key not in call.masks:
        filled = bool(reduced and reduced.filled) or bool(call.block and call.block.filled)
        columns = None
        if filled or call.valid is not None or call.mask is not None:
            columns = _columns(call, reduced, past, hidden)
        call.masks[key] = _build_mask(call, config, columns, past, hidden)
    return call.masks[key]


def _columns(call: Call, reduced: caches.ReducedMixin | None, past: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logical index of every key that a layer will hold, -1 for fill, int64 of shape (B, K)."""
    batch, device = hidden.shape[0], hidden.device
    held = reduced.indices() if reduced else torch.arange(past, device=device).expand(batch, -1)
    if call.block is None:
        coming = torch.arange(call.past, call.past + call.length, device=device).expand(batch, -1)
    else:
        coming = torch.where(call.block.keep < 0, -1, call.block.keep + call.past)
    return torch.cat([held.to(device), coming], dim=1)


def _build_mask(
    call: Call, config: Any, columns: torch.Tensor | None, past: int, hidden: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the mask and which keys are valid, bool of shape (B, K), None for all."""
    valid = None
    if columns is None:
        if (hidden.shape[1] == 1 or past == 0) and _needs_no_causal_mask(config):
            return None, None
    else:
        valid = columns >= 0
        if call.valid is not None:
            valid &= call.valid.gather(1, columns.clamp(min=0))
        if call.mask is not None:
            mask = call.mask.expand(hidden.shape[0], -1, -1, -1)
            mask = mask if call.block is None else call.block.gather(mask.transpose(1, 2)).transpose(1, 2)
            index = columns.clamp(min=0)[:, None, None].expand(-1, *mask.shape[1:3], -1)
            barred = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            return mask.gather(-1, index).masked_fill(~valid[:, None, None], barred), valid
    from transformers.masking_utils import create_causal_mask

    lengths: Any = {mask_cache_argument(): _Lengths(past)}
    mask = create_causal_mask(config=config, inputs_embeds=hidden, attention_mask=valid, position_ids=None, **lengths)
    return mask, valid


def _needs_no_causal_mask(config: Any) -> bool:
    """Return whether the kernel is causal by itself for one query, or for as many queries as keys."""
    implementation = config._attn_implementation or ""
    return implementation == "sdpa" or "flash" in implementation


def _is_packed(positions: torch.Tensor, batch: int) -> bool:
    from transformers.masking_utils import find_packed_sequence_indices

    if positions.dim() == 3:
        if positions.shape[0] != 4:
            return False
        positions = positions[0]
    return find_packed_sequence_indices(positions.expand(batch, -1)) is not None
