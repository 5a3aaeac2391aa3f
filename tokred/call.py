"""The state of one call of a model with a handle."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from .layout import MediaItem, Span
from .method import Selection
from .observe import Capture
from .reduction import Reduction
from .report import CallReport


@dataclass
class Encoding:
    """State of one call of a method that encodes media.

    Attributes:
        capture: what the taps in the tower saw.
        projected: what is left of each tile before the projector, by steps inside the tower or there; None for all.
        length: number of patches of a tile.
        order: for the patches that the tower left, ascending, their places in what it gives back; None if it gives back
            all of them in order.
    """

    capture: Capture = field(default_factory=Capture)
    projected: Selection | None = None
    length: int = 0
    order: torch.Tensor | None = None


@dataclass(frozen=True)
class Opening:
    """What the decoder began with.

    Args:
        embeds: its input, (B, P, D).
        block: which of the call's tokens these are; None for all.
        spans: the media items among them, in the order of `Call.spans`.
    """

    embeds: torch.Tensor
    block: Reduction | None
    spans: list[Span]


@dataclass
class Call:
    """State of one call of the base model.

    Attributes:
        owner: the hooks of the model that runs.
        outer: the call around this one, or None.
        ids: token ids, (B, L), or None.
        type_ids: `mm_token_type_ids`, (B, L), or None.
        labels: the call's own copy of the labels, or None.
        items: media encoded inside this call or passed to it, by modality.
        capture: what the attention taps saw.
        active: whether anything is shorter than stock: the tokens of this call or the layers of the cache.
        cache: the cache that the decoder uses, or None.
        past: number of logical tokens in the cache before the call.
        length: number of logical tokens that the call brings.
        valid: which logical tokens are no padding, bool of shape (B, past + length), or None for all.
        mask: a 4-D mask given by the user, or None.
        block: which of the call's tokens reach the current layer; None for all.
        segment: name of `block` in the cache layers.
        spans: the media items among the tokens that reach the current layer.
        opening: what the decoder began with, as long as a step may observe it.
        renumbers: whether position ids differ from those that the decoder got, by this call or an earlier one.
        position_ids: ids from which the rotary embeddings of the tokens that reach the current layer are made, but for
            the shifts of earlier calls; None before the decoder makes them, and if `renumbers` is False.
        shift: how far this call moves the ids of each sample's later tokens back, int64 of shape (B,); None for not.
        rotary: rotary embeddings of the layers so far, by the keys that a layer holds and `segment`.
        replaced: what the layers after a reduction inside the decoder get in place of what the decoder passes.
        masks: mask and valid keys of the layers so far, by the keys that a layer holds.
        valid_keys: valid keys of the layer that ran last, bool of shape (B, K), or None for all.
        report: what the call did, or None if it did nothing.
    """

    owner: object
    outer: Call | None
    ids: torch.Tensor | None
    type_ids: torch.Tensor | None
    labels: torch.Tensor | None
    items: dict[str, list[MediaItem]] = field(default_factory=dict)
    capture: Capture = field(default_factory=Capture)
    active: bool = False
    cache: Any = None
    past: int = 0
    length: int = 0
    valid: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    block: Reduction | None = None
    segment: int = -1
    spans: list[Span] = field(default_factory=list)
    opening: Opening | None = None
    renumbers: bool = False
    position_ids: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    rotary: dict[Any, Any] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)
    valid_keys: torch.Tensor | None = None
    report: CallReport | None = None


current_call: ContextVar[Call | None] = ContextVar("tokred_call", default=None)
current_encoding: ContextVar[Encoding | None] = ContextVar("tokred_encoding", default=None)
labels_of_call: ContextVar[torch.Tensor | None] = ContextVar("tokred_labels", default=None)
