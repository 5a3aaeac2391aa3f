"""The attention tap: see q, k and v of one attention module without changing how it computes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import kernels

_PREFIX = "tokred_"


@dataclass(frozen=True)
class Seen:
    """What an attention kernel received.

    Args:
        query: (B, heads, Q, head_dim), after RoPE.
        key: (B, kv_heads, K, head_dim), after RoPE and with the cached keys in front.
        scaling: factor of the logits.
    """

    query: torch.Tensor
    key: torch.Tensor
    scaling: float

    def rows(self, index: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention probabilities of one query per sample.

        Args:
            index: the query's place, int64 of shape (B,).
            valid: keys that the query may see, bool of shape (B, K); None for all.

        Returns:
            (B, heads, K), computed in float32 and returned in the dtype of the query.
        """
        samples = torch.arange(len(self.query), device=index.device)
        alone = Seen(self.query[samples, :, index].unsqueeze(2), self.key, self.scaling)
        return alone.all_rows(None if valid is None else valid.unsqueeze(1)).squeeze(2)

    def all_rows(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention probabilities of all queries, which should be few.

        Args:
            visible: keys that each query may see, bool of shape (B, Q, K); None for all.

        Returns:
            (B, heads, Q, K), computed in float32 and returned in the dtype of the query.
        """
        batch, heads, queries, width = self.query.shape
        # The heads that share keys stand below each other.
        query = self.query.reshape(batch, self.key.shape[1], -1, width)
        logits = (query @ self.key.transpose(-1, -2)).view(batch, heads, queries, -1) * self.scaling
        if visible is not None:
            logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
        return logits.softmax(dim=-1, dtype=torch.float32).to(self.query.dtype)

    def joined(self) -> Seen:
        """Return what the kernel would receive if all its heads, as many for keys as for queries, were one."""
        query, key = (part.transpose(1, 2).flatten(2).unsqueeze(1) for part in (self.query, self.key))
        return Seen(query, key, query.shape[-1] ** -0.5)

    def column_sums(self) -> torch.Tensor:
        """Return the attention that every key receives: mean over heads, sum over all queries, float32 (B, K)."""
        return kernels.attention_columns(self.query, self.key, self.scaling) * self.query.shape[2]


@dataclass
class Capture:
    """What the taps of one call saw, by module.

    Attributes:
        attention: what each call of a tapped module's kernel received; towers with windows call it once a window.
        outputs: hidden states that left a module.
        neurons: which neurons of an FFN were active, bool of shape (B, P, neurons), by the module that takes them.
    """

    attention: dict[nn.Module, list[Seen]] = field(default_factory=dict)
    outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    neurons: dict[nn.Module, torch.Tensor] = field(default_factory=dict)


capturing: ContextVar[Capture | None] = ContextVar("tokred_capturing", default=None)


def _stock_attention(module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    implementation = module.config._attn_implementation.removeprefix(_PREFIX)  # type: ignore[union-attr, operator]
    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    return sys.modules[type(module).__module__].eager_attention_forward


def _tapped_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    capture = capturing.get()
    if capture is not None:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        seen = capture.attention.setdefault(module, [])
        seen += _segments(Seen(query, key, scaling), kwargs.get("cu_seq_lens_q"))
    return _stock_attention(module)(module, query, key, value, *args, **kwargs)


def _segments(seen: Seen, borders: torch.Tensor | None) -> list[Seen]:
    """Return what a kernel received as the calls, one for each segment, that a kernel without borders would get."""
    if borders is None:
        return [seen]
    lengths = borders.diff().tolist()
    parts = zip(seen.query.split(lengths, dim=2), seen.key.split(lengths, dim=2), strict=True)
    return [Seen(query, key, seen.scaling) for query, key in parts]


def seen_ahead(
    layer: Any, attention: Any, hidden: torch.Tensor, rotary: Any, last: torch.Tensor, cached: torch.Tensor | None
) -> Seen:
    """Return what a decoder layer's kernel would receive from its input, for one query per sample.

    Args:
        layer: the decoder layer.
        attention: its attention module.
        hidden: its input, (B, P, D).
        rotary: cosines and sines of the input's positions, (B or 1, P, head_dim) each.
        last: the place of each sample's query, int64 of shape (B,).
        cached: keys in the cache, (B, kv_heads, C, head_dim); None for none.

    Returns:
        Query (B, heads, 1, head_dim) and keys (B, kv_heads, C + P, head_dim).
    """
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    normed = layer.input_layernorm(hidden)
    samples = torch.arange(len(hidden), device=hidden.device)
    cos, sin = (part.expand(len(hidden), -1, -1) for part in rotary)
    query = attention.q_proj(normed[samples, last]).view(len(hidden), -1, 1, attention.head_dim)
    key = attention.k_proj(normed).view(*normed.shape[:2], -1, attention.head_dim).transpose(1, 2)
    query, _ = rotate(query, query, cos[samples, last].unsqueeze(1), sin[samples, last].unsqueeze(1))
    _, key = rotate(key, key, cos, sin)
    return Seen(query, key if cached is None else torch.cat([cached, key], dim=2), attention.scaling)


def _follow(source: Any, module: nn.Module, args: Any) -> None:
    """Point the module's own config at the tap of the implementation that the model uses now."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _PREFIX + source._attn_implementation
    if module.config._attn_implementation != name:  # type: ignore[union-attr]
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, _tapped_attention)
        module.config._attn_implementation = name  # type: ignore[union-attr]


class _Follower:
    """A pre-hook that keeps the tap in step with `model.set_attn_implementation`."""

    def __init__(self, source: Any):
        self.source = source

    def __call__(self, module: nn.Module, args: Any) -> None:
        _follow(self.source, module, args)


def tap(module: nn.Module) -> Callable[[], None]:
    """Let an attention module report what its kernel receives, and return the function that undoes it.

    Args:
        module: an attention module that takes its kernel from transformers' `AttentionInterface` by the name in
            `module.config`.
    """
    source = module.config
    module.config = copy.copy(source)
    handle = module.register_forward_pre_hook(_Follower(source))

    def undo() -> None:
        handle.remove()
        module.config = source

    return undo
