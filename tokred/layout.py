"""The layout of a call: which of its tokens show which media item, per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import UnsupportedInputError


@dataclass(frozen=True)
class MediaItem:
    """One encoded image or video.

    Args:
        modality: `"image"` or `"video"`.
        length: number of its tokens in the prompt.
        cells: returns for each token its frame, view, row and column, int64 of shape (length, 4); view 0 is the whole
            image, later views are its tiles; row and column are -1 for a separator. None if the grid is not known.
        merged_into: for each token the token that absorbed it before the decoder, -1 for none; None if none was.
        left: how many tokens were left after each step that acted while the item was encoded.
    """

    modality: str
    length: int
    cells: Callable[[], torch.Tensor] | None = None
    merged_into: torch.Tensor | None = None
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """The tokens [start, stop) of one sample that show one media item."""

    sample: int
    start: int
    stop: int
    item: MediaItem

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def place_items(placeholders: dict[str, torch.Tensor], items: Mapping[str, Sequence[MediaItem]]) -> list[Span]:
    """Return where each media item stands, in the order of samples and tokens.

    Args:
        placeholders: for each modality which tokens stand for media, bool of shape (B, L).
        items: for each modality its items in the order in which the batch shows them. A modality whose items are not
            known, or do not add up to the placeholders, counts every run of placeholders as one item.
    """
    spans = []
    for modality, mask in placeholders.items():
        runs = _runs(mask)
        known = items.get(modality, ())
        if sum(item.length for item in known) != sum(stop - start for _, start, stop in runs):
            spans += [Span(sample, start, stop, MediaItem(modality, stop - start)) for sample, start, stop in runs]
            continue
        queue = iter(known)
        for sample, start, stop in runs:
            while start < stop:
                item = next(queue)
                if start + item.length > stop:
                    raise UnsupportedInputError(
                        f"sample {sample}: an item of {item.length} {modality} tokens does not fit into "
                        f"{stop - start} placeholders from position {start}"
                    )
                spans.append(Span(sample, start, start + item.length, item))
                start += item.length
    return sorted(spans, key=lambda span: (span.sample, span.start))


def _runs(mask: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return sample, start and stop of every run of True, in order."""
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff(dim=1)
    starts = (edges == 1).nonzero().tolist()
    stops = (edges == -1).nonzero().tolist()
    return [(sample, start, stop) for (sample, start), (_, stop) in zip(starts, stops, strict=True)]
