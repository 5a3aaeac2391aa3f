"""The stock model with removed keys masked: what a shortened run has to equal."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from tokred.cache import ReducedMixin


def surviving(handle: Any) -> torch.Tensor:
    """Return which tokens of the last prefill survived, bool of shape (B, L)."""
    return ~handle._session.statistics.last.block.dropped()


def surviving_by_layer(cache: Any, length: int) -> list[torch.Tensor]:
    """Return which of the first `length` tokens each layer of a cache holds, bool of shape (B, length) each."""
    held = []
    for layer in cache.layers:
        batch = layer.keys.shape[0]
        if not isinstance(layer, ReducedMixin):
            held.append(torch.ones(batch, length, dtype=torch.bool))
            continue
        indices = layer.indices()
        kept = torch.zeros(batch, layer.logical_length + 1, dtype=torch.bool)
        # Fill goes to a place of its own, behind the tokens.
        kept.scatter_(1, torch.where(indices < 0, layer.logical_length, indices), True)
        held.append(kept[:, :length])
    return held


def merged_embeds(model: Any, batch: dict[str, Any], embeds: torch.Tensor) -> torch.Tensor:
    """Return the embeddings with media as the attached method encodes them, zeros for carriers."""
    encoder = {name: batch[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in batch}
    features = torch.cat(list(model.model.get_image_features(**encoder, return_dict=True).pooler_output))
    media = batch["input_ids"] == tiny.IMAGE
    changed = embeds.clone()
    changed[media] = features.nan_to_num(0.0)
    return changed


def masked_logits(
    model: Any, inputs: dict[str, Any], kept: list[torch.Tensor], valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits of the stock decoder whose layers cannot see removed keys.

    Args:
        model: a stock model without a handle.
        inputs: `inputs_embeds` and `position_ids` of the unpruned sequence.
        kept: for each layer which keys are there, bool of shape (B, L); padding does not matter.
        valid: which tokens are no padding, bool of shape (B, L).
    """
    embeds = inputs["inputs_embeds"]
    length = embeds.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own = torch.eye(length, dtype=torch.bool)
    valid = torch.ones_like(kept[0]) if valid is None else valid

    def additive(keys: torch.Tensor) -> torch.Tensor:
        seen = (causal & keys[:, None, :]) | own
        return torch.where(seen, 0.0, torch.finfo(embeds.dtype).min).unsqueeze(1)

    hooks = []
    for index, layer in enumerate(model.model.language_model.layers):
        mask = additive(valid & kept[index])

        def replace(module: Any, args: Any, kwargs: Any, mask: torch.Tensor = mask) -> Any:
            return args, kwargs | {"attention_mask": mask}

        hooks.append(layer.register_forward_pre_hook(replace, with_kwargs=True))
    try:
        hidden = model.model.language_model(
            inputs_embeds=embeds, position_ids=inputs["position_ids"], attention_mask=additive(valid), use_cache=False
        ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return model.lm_head(hidden)
