"""Cache layers that hold fewer keys than the tokens they stand for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from .errors import StaleCacheError, UnsupportedCacheError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Set while a model with a handle runs: outside of it stock code would misread a shortened layer.
handle_is_active: ContextVar[bool] = ContextVar("tokred_handle_is_active", default=False)

_segments = itertools.count()


def new_segment() -> int:
    """Return a number that names the tokens which one call appends to all layers of a group."""
    return next(_segments)


class ReducedMixin:
    """Adds to a stock cache layer the logical index of every key it holds.

    Attributes:
        stored: logical index of the keys of reduced calls, -1 for fill, int64 of shape (B, n), n <= physical length.
            Keys after them are consecutive and end at `logical_length`.
        logical_length: number of tokens that the layer stands for.
        segments: names of the reduced calls whose keys the layer holds; layers with equal names hold equal indices.
        shift: how far the position ids of each sample's coming tokens move back, int64 of shape (B,); None for not.
    """

    stored: torch.Tensor
    logical_length: int
    segments: tuple[int, ...]
    shift: torch.Tensor | None
    keys: torch.Tensor
    _announced: tuple[torch.Tensor, int, int] | None
    _filled: bool

    @property
    def physical_length(self) -> int:
        """Number of keys that the layer holds."""
        return super().get_seq_length()  # type: ignore[misc]

    @property
    def filled(self) -> bool:
        """Whether a key may be fill."""
        return self._filled

    def announce(
        self, keep: torch.Tensor, filled: bool, length: int, segment: int, shift: torch.Tensor | None = None
    ) -> None:
        """Say which of the next `length` tokens the next update brings.

        Args:
            keep: index of each coming key among those tokens, -1 for fill, (B, n).
            filled: whether `keep` has fill.
            length: number of tokens that the update stands for.
            segment: name of the call, see `new_segment`.
            shift: how far the call moves the position ids of later tokens back, int64 of shape (B,); None for not.
        """
        indices = torch.where(keep < 0, keep, keep + self.logical_length)
        self._announced = torch.cat([self.indices().to(keep.device), indices], dim=1), length, segment
        self._filled = self._filled or filled
        if shift is not None:
            self.shift = shift if self.shift is None else self.shift + shift

    def indices(self) -> torch.Tensor:
        """Return the logical index of every key, -1 for fill, int64 of shape (B, physical length)."""
        tail = self.physical_length - self.stored.shape[1]
        if tail == 0:
            return self.stored
        rest = torch.arange(self.logical_length - tail, self.logical_length, device=self.stored.device)
        return torch.cat([self.stored, rest.expand(self.stored.shape[0], -1)], dim=1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append keys and values as the stock layer does, and their logical indices.

        Raises:
            StaleCacheError: no tokred handle is active on the model.
        """
        if not handle_is_active.get():
            raise StaleCacheError(
                f"this cache holds {self.physical_length} keys for {self.logical_length} tokens and can only be used "
                "by a model with a tokred handle; keep the handle attached until the conversation ends"
            )
        if self._announced is None:
            self.logical_length += key_states.shape[-2]
        else:
            self.stored, length, segment = self._announced
            self.logical_length += length
            self.segments += (segment,)
            self._announced = None
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def get_seq_length(self) -> int:
        """Return the number of tokens that the layer stands for."""
        return self.logical_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after the next update, and the number of tokens missing before them."""
        return self.physical_length + query_length, self.logical_length - self.physical_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, all of which must have been appended unreduced."""
        tail = self.physical_length - self.stored.shape[1]
        if abs(tokens_to_remove) > tail:
            raise UnsupportedCacheError(
                f"cannot remove {abs(tokens_to_remove)} tokens: only the last {tail} were appended without reduction"
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self.logical_length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()  # type: ignore[misc]
        self._start(self.stored[:, :0], 0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._move(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some samples."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._move(lambda x: x[indices])

    def _move(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the samples of everything that is kept for each of them."""
        self.stored = function(self.stored)
        if self.shift is not None:
            self.shift = function(self.shift)

    def _start(self, stored: torch.Tensor, length: int) -> None:
        self.stored = stored
        self.logical_length = length
        self.segments = ()
        self.shift = None
        self._announced = None
        self._filled = False


@functools.cache
def _reduced_classes() -> dict[type, Any]:
    from transformers.cache_utils import DynamicLayer

    return {DynamicLayer: type("ReducedDynamicLayer", (ReducedMixin, DynamicLayer), {"_layer_type": None})}


def check_cache(cache: Cache) -> None:
    """Raise `UnsupportedCacheError` unless every layer of the cache can be shortened."""
    allowed = _reduced_classes()
    for index, layer in enumerate(cache.layers):
        if type(layer) not in allowed and not isinstance(layer, ReducedMixin):
            names = ", ".join(kind.__name__ for kind in allowed)
            raise UnsupportedCacheError(
                f"cache layer {index} is a {type(layer).__name__}; tokred can shorten {names}. "
                "Leave `cache_implementation` at its default, or pass a DynamicCache"
            )
    replicated = getattr(cache, "layer_class_to_replicate", None)
    if replicated is not None and replicated not in allowed:
        raise UnsupportedCacheError(f"the cache makes layers of class {replicated.__name__}, which cannot be shortened")
    if getattr(cache, "offloading", False):
        raise UnsupportedCacheError("an offloaded cache cannot be shortened; pass a DynamicCache without offloading")


def layer_of(cache: Cache | None, index: int) -> Any:
    """Return layer `index` of a cache, None if there is no cache or it has not come so far."""
    return None if cache is None or len(cache.layers) <= index else cache.layers[index]


def reduced_layer(cache: Cache, index: int, batch: int, device: torch.device) -> ReducedMixin:
    """Return layer `index` of the cache, turned into a reduced layer that holds what the stock layer held.

    Args:
        cache: a cache that passed `check_cache`.
        index: the layer.
        batch: number of samples.
        device: where the indices live while the layer is still empty.
    """
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, ReducedMixin):
        return layer
    length = layer.get_seq_length()
    kind = _reduced_classes()[type(layer)]
    shortened: Any = kind.__new__(kind)
    shortened.__dict__.update(layer.__dict__)
    shortened._start(torch.arange(length, device=device).expand(batch, -1), length)
    cache.layers[index] = shortened
    return shortened
