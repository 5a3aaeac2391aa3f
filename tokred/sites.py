"""What a step inside or before the decoder sees: groups of media, equally long ones together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .call import Call
from .errors import UndeclaredObservationError
from .layout import Span
from .method import Context, Method, Need, Observation, Step
from .observe import Seen

# The groups of media that a step chooses from at once, each with the places of the text after it.
Bucket = list[tuple[list[Span], torch.Tensor | None]]


def groups_of(spans: list[Span], scope: str) -> list[list[Span]]:
    """Return the spans that share a budget: each on its own, or all of a sample."""
    if scope == "item":
        return [[span] for span in spans]
    samples: dict[int, list[Span]] = {}
    for span in spans:
        samples.setdefault(span.sample, []).append(span)
    return list(samples.values())


def buckets_of(call: Call, method: Method, step: Step, device: torch.device) -> list[Bucket]:
    """Return the groups of media that a step chooses from, equally long ones together."""
    found: dict[tuple[int, int], Bucket] = {}
    for group in groups_of(call.spans, getattr(method, "scope", "item")):
        length = sum(span.length for span in group)
        if method.count(length) == length:
            continue
        text = _text_after(call, group, device) if step.observes(Need.TEXT) else None
        found.setdefault((length, -1 if text is None else len(text)), []).append((group, text))
    return list(found.values())


def _text_after(call: Call, group: list[Span], device: torch.device) -> torch.Tensor:
    """Return the places of the text tokens after a group of media, int64 of shape (T,)."""
    sample, stop = group[-1].sample, group[-1].stop
    size = call.length if call.block is None else call.block.keep.shape[1]
    text = torch.arange(size, device=device) >= stop
    if call.block is not None:
        text &= call.block.keep[sample] >= 0
    if call.valid is not None:
        tokens = torch.arange(size, device=device) if call.block is None else call.block.keep[sample].clamp(min=0)
        text &= call.valid[sample, call.past :][tokens]
    for span in call.spans:
        if span.sample == sample:
            text[span.start : span.stop] = False
    return text.nonzero()[:, 0]


@dataclass
class Site:
    """A bucket of equally long groups of media at the site of a step inside or before the decoder."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    attention: Callable[[int], nn.Module]
    call: Call
    step: Step
    hidden: torch.Tensor
    bucket: Bucket

    def __post_init__(self) -> None:
        device = self.hidden.device
        self.samples = torch.tensor([group[0].sample for group, _ in self.bucket], device=device)
        self.places = torch.tensor(
            [[place for span in group for place in range(span.start, span.stop)] for group, _ in self.bucket],
            device=device,
        )
        texts = [text for _, text in self.bucket if text is not None]
        self.text_places = torch.stack(texts) if texts else None

    def context(self) -> Context:
        """Return what the step sees."""
        text = None if self.text_places is None else self.original(self.text_places)
        return Context(self._rows(self.places), self.step.needs, self._observe, self.original(self.places), text)

    def original(self, places: torch.Tensor) -> torch.Tensor:
        """Return the positions in the unpruned call of places of the bucket's samples, (G, n)."""
        block = self.call.block
        return places if block is None else block.keep[self.samples.unsqueeze(1), places]

    def _rows(self, places: torch.Tensor) -> torch.Tensor:
        return self.hidden[self.samples.unsqueeze(1), places]

    def _observe(self, observation: Observation, text: bool) -> torch.Tensor:
        need = observation.need
        places = self.text_places if text and self.text_places is not None else self.places
        if need is Need.NORMED_HIDDEN:
            return self.norm(self._rows(places))
        if self.step.layer is None or need not in (Need.LAYER_KEYS, Need.LAST_ROW):
            raise UndeclaredObservationError(f"{observation} cannot be observed at stage {self.step.stage}")
        seen = self.call.capture.attention[self.attention(self.step.layer - 1)][-1]
        keys = places + seen.key.shape[2] - self.hidden.shape[1]
        if need is Need.LAYER_KEYS:
            return seen.key[self.samples.unsqueeze(1), :, keys].flatten(2)
        rows = seen.rows(self._last_places(seen), self.call.valid_keys)[self.samples]
        return rows.gather(2, keys.unsqueeze(1).expand(-1, rows.shape[1], -1))

    def _last_places(self, seen: Seen) -> torch.Tensor:
        """Return the place of each sample's last token among the queries, int64 of shape (B,)."""
        batch, _, queries, _ = seen.query.shape
        if self.call.valid_keys is None:
            return torch.full((batch,), queries - 1, device=seen.query.device)
        order = torch.arange(queries, device=seen.query.device)
        return (order * self.call.valid_keys[:, -queries:]).argmax(1)
