"""What a step inside or before the decoder sees: groups of media, equally long ones together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .call import Call, Opening
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
    """Return the groups of media that a step chooses from, those together whose observations have equal shapes."""
    found: dict[tuple[int, ...], Bucket] = {}
    for group in groups_of(call.spans, getattr(method, "scope", "item")):
        length = sum(span.length for span in group)
        total = sum(span.item.length for span in group)
        count = method.count(length) if step.count is None else step.count(total, length)
        if count == length:
            continue
        text = _text_after(call, group, device) if step.observes(Need.TEXT) else None
        began = sum(span.length for span in _at_opening(call, group)) if step.observes(Need.EMBEDDINGS) else total
        found.setdefault((length, total, began, -1 if text is None else len(text)), []).append((group, text))
    return list(found.values())


def _at_opening(call: Call, group: list[Span]) -> list[Span]:
    """Return the spans of a group as they were when the decoder began."""
    if call.opening is None:
        return group
    began = {id(span): first for span, first in zip(call.spans, call.opening.spans, strict=True)}
    return [began[id(span)] for span in group]


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


def _places(groups: list[list[Span]], device: torch.device) -> torch.Tensor:
    """Return the places of equally long groups of media, int64 of shape (G, n)."""
    return torch.tensor(
        [[place for span in group for place in range(span.start, span.stop)] for group in groups], device=device
    )


@dataclass
class Site:
    """A bucket of equally long groups of media at the site of a step inside or before the decoder."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    attention: Callable[[int], nn.Module]
    ffn: Callable[[int], nn.Module]
    call: Call
    step: Step
    hidden: torch.Tensor
    bucket: Bucket
    ahead: Callable[[], tuple[Seen, torch.Tensor | None]] | None = None

    def __post_init__(self) -> None:
        device = self.hidden.device
        self.samples = torch.tensor([group[0].sample for group, _ in self.bucket], device=device)
        self.places = _places([group for group, _ in self.bucket], device)
        texts = [text for _, text in self.bucket if text is not None]
        self.text_places = torch.stack(texts) if texts else None

    def context(self) -> Context:
        """Return what the step sees."""
        text = None if self.text_places is None else self.original(self.text_places)
        total = sum(span.item.length for span in self.bucket[0][0])
        return Context(self._rows(self.places), self.step.needs, self._observe, self.original(self.places), text, total)

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
        if need is Need.EMBEDDINGS and self.call.opening is not None:
            return self._embeddings(self.call.opening, text)
        if need is Need.NEXT_ROW and self.ahead is not None:
            seen, valid = self.ahead()
            rows = seen.all_rows(None if valid is None else valid.unsqueeze(1)).squeeze(2)
            return self._of_places(rows, places)
        if need is Need.ACTIVE_NEURONS and self.step.layer is not None:
            return self.call.capture.neurons[self.ffn(self.step.layer - 1)][self.samples.unsqueeze(1), places]
        if self.step.layer is None or need not in (Need.LAYER_KEYS, Need.LAST_ROW, Need.TEXT_ROWS):
            raise UndeclaredObservationError(f"{observation} cannot be observed at stage {self.step.stage}")
        seen = self.call.capture.attention[self.attention(self.step.layer - 1)][-1]
        if need is Need.LAYER_KEYS:
            keys = places + seen.key.shape[2] - self.hidden.shape[1]
            return seen.key[self.samples.unsqueeze(1), :, keys].flatten(2)
        valid = self.call.valid_keys
        if need is Need.TEXT_ROWS:
            return self._text_rows(seen, valid, places)
        return self._of_places(seen.rows(last_places(valid, seen.query), valid), places)

    def _embeddings(self, opening: Opening, text: bool) -> torch.Tensor:
        """Return what the decoder began with of the bucket's text or media, (G, n, D)."""
        if text and self.text_places is not None:
            places = self.original(self.text_places)
            places = places if opening.block is None else opening.block.places(self.samples, places)
        else:
            places = _places([_at_opening(self.call, group) for group, _ in self.bucket], self.hidden.device)
        return opening.embeds[self.samples.unsqueeze(1), places]

    def _text_rows(self, seen: Seen, valid: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
        """Return the attention of the bucket's text tokens (G, T) to places (G, n), (G, heads, T, n)."""
        if self.text_places is None:
            raise UndeclaredObservationError(f"the step did not declare {Need.TEXT}, which {Need.TEXT_ROWS} goes with")
        before, text = seen.key.shape[2] - self.hidden.shape[1], self.text_places
        visible = torch.arange(seen.key.shape[2], device=text.device) <= (text + before).unsqueeze(-1)
        if valid is not None:
            visible &= valid[self.samples].unsqueeze(1)
        samples = self.samples.unsqueeze(1)
        part = Seen(seen.query[samples, :, text].transpose(1, 2), seen.key[self.samples], seen.scaling)
        rows = part.all_rows(visible)
        return rows.gather(3, (places + before)[:, None, None].expand(-1, *rows.shape[1:3], -1))

    def _of_places(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return rows (B, heads, K) of the bucket's samples at the keys of places (G, n) of this call."""
        rows = rows[self.samples]
        keys = places + rows.shape[2] - self.hidden.shape[1]
        return rows.gather(2, keys.unsqueeze(1).expand(-1, rows.shape[1], -1))


def last_places(valid: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return the place of each sample's last token, int64 of shape (B,).

    Args:
        valid: which keys are no padding, bool of shape (B, K), the last of which belong to `x`; None for all.
        x: a tensor (B, ..., P, D) with an entry for each place.
    """
    length = x.shape[-2]
    if valid is None:
        return torch.full((x.shape[0],), length - 1, device=x.device)
    return (torch.arange(length, device=x.device) * valid[:, -length:]).argmax(1)
