"""What a handle did: counts per stage, the origin of every surviving token, and a picture of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .errors import UnsupportedInputError
from .layout import MediaItem, Span
from .method import Stage, Step

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class StageReport:
    """Visual tokens before and after one step of the last prefill, per sample."""

    stage: str
    method: str
    layer: int | None
    tokens_before: list[int]
    tokens_after: list[int]


@dataclass(frozen=True)
class TraceToken:
    """One surviving visual token.

    Args:
        position: its position in the unpruned prompt.
        modality: `"image"` or `"video"`.
        item: which item of its sample it belongs to.
        frame, view, row, column: its cell; -1 where the grid is not known, row and column also for a separator.
        merged: positions of the tokens that were merged into it.
    """

    position: int
    modality: str
    item: int
    frame: int
    view: int
    row: int
    column: int
    merged: tuple[int, ...]


class Survivors(Protocol):
    """The survivors of a call."""

    def dropped(self) -> torch.Tensor:
        """Return which tokens of the call are gone, bool of shape (B, L)."""


class CallReport:
    """What one prefill, or one call of an encoder, did, in tensors that are read only when somebody asks.

    Args:
        model_type: the family.
        batch: number of samples.
        length: number of tokens of the call.
        spans: its media items before any reduction.
    """

    def __init__(self, model_type: str, batch: int, length: int, spans: Sequence[Span]):
        self.model_type = model_type
        self.batch = batch
        self.length = length
        self.spans = list(spans)
        self.stages: list[StageReport] = []
        self.layer_lengths: list[int] = []
        self.block: Survivors | None = None
        self._layer_tokens: list[int] = []
        self._merges: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, method: str, step: Step, before: Sequence[Span], after: Sequence[Span]) -> None:
        """Note what a step of a method did to the media of the call."""
        counts = self._per_sample(before), self._per_sample(after)
        self.stages.append(StageReport(str(step.stage), method, step.layer, *counts))

    def add_encoding(self, steps: Sequence[tuple[str, Step]], before: Sequence[Span], after: Sequence[Span]) -> None:
        """Note what the steps of methods did while the media were encoded, as far as the items know it.

        Args:
            steps: the methods' names with their steps, in order.
            before: the media as the prompt has them.
            after: what is left of them.
        """
        if not steps or any(len(span.item.left) != len(steps) for span in before):
            # Encoded before the handle was paused or overridden, or repeated by a beam search: only the sum is known.
            name, stage = (steps[0][0], steps[0][1].stage) if len(steps) == 1 else ("encoded earlier", Stage.FEATURES)
            self.stages.append(StageReport(str(stage), name, None, self._per_sample(before), self._per_sample(after)))
            return
        counts = self._per_sample(before)
        for index, (name, step) in enumerate(steps):
            left = [0] * self.batch
            for span in before:
                left[span.sample] += span.item.left[index]
            self.stages.append(StageReport(str(step.stage), name, None, counts, left))
            counts = left

    def _per_sample(self, spans: Sequence[Span]) -> list[int]:
        counts = [0] * self.batch
        for span in spans:
            counts[span.sample] += span.length
        return counts

    def saw(self, length: int, tokens: int) -> None:
        """Note the sequence that a layer received, and the visual tokens in all its rows."""
        self.layer_lengths.append(length)
        self._layer_tokens.append(tokens)

    def merge(self, samples: torch.Tensor, positions: torch.Tensor, merged_into: torch.Tensor) -> None:
        """Note which tokens absorbed others: samples (G,), original positions (G, N), tokens inside the item (G, N)."""
        self._merges.append((samples, positions, merged_into))

    def finish(self, block: Survivors | None) -> CallReport:
        """Note the survivors of the call."""
        self.block = block
        return self

    @property
    def visual_tokens(self) -> tuple[int, int]:
        """Visual tokens before the first and after the last step."""
        before = sum(span.length for span in self.spans)
        return before, sum(self.stages[-1].tokens_after) if self.stages else before

    @property
    def token_layers(self) -> float:
        """Mean share of the visual tokens over the layers of the decoder, or of an encoder that stands alone."""
        before = self.visual_tokens[0]
        if not self._layer_tokens or not before:
            return 1.0
        return sum(self._layer_tokens) / (before * len(self._layer_tokens))

    def merged_into(self) -> torch.Tensor:
        """Return for each position of the call the position that absorbed it, -1 for none, (B, L) on the host."""
        targets = torch.full((self.batch, self.length), -1)
        for span in self.spans:
            if span.item.merged_into is not None:
                inner = span.item.merged_into.cpu()
                targets[span.sample, span.start : span.stop] = torch.where(inner < 0, inner, inner + span.start)
        for samples, positions, inner in self._merges:
            places = positions.cpu()
            outer = torch.where(inner.cpu() < 0, -1, places.gather(1, inner.cpu().clamp(min=0)))
            targets[samples.cpu().unsqueeze(1), places] = outer
            # What absorbed others before may have been absorbed now.
            further = targets.gather(1, targets.clamp(min=0))
            targets = torch.where((targets >= 0) & (further >= 0), further, targets)
        return targets

    def trace(self) -> list[list[TraceToken]]:
        """Return the surviving visual tokens of each sample in order."""
        targets = self.merged_into()
        alive = torch.ones((self.batch, self.length), dtype=torch.bool)
        if self.block is not None:
            alive = ~self.block.dropped().cpu()
        tokens: list[list[TraceToken]] = [[] for _ in range(self.batch)]
        numbers = [0] * self.batch
        for span in self.spans:
            cells = _cells(span.item)
            for offset, position in enumerate(range(span.start, span.stop)):
                if alive[span.sample, position]:
                    absorbed = (targets[span.sample] == position).nonzero()[:, 0].tolist()
                    frame, view, row, column = cells[offset].tolist()
                    number = numbers[span.sample]
                    tokens[span.sample].append(
                        TraceToken(
                            position, span.item.modality, number, frame, view, row, column, merged=tuple(absorbed)
                        )
                    )
            numbers[span.sample] += 1
        return tokens


class Statistics:
    """Sums over the calls of a handle; nothing here influences a result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.idle_calls = 0
        self.seconds = 0.0
        self.visual_before = 0
        self.visual_after = 0
        self.last: CallReport | None = None

    def add_time(self, seconds: float) -> None:
        """Add host time spent in hooks."""
        with self._lock:
            self.seconds += seconds

    def add_idle(self) -> None:
        """Add a prefill without media."""
        with self._lock:
            self.idle_calls += 1

    def add(self, report: CallReport) -> None:
        """Add a prefill."""
        before, after = report.visual_tokens
        with self._lock:
            self.calls += 1
            self.visual_before += before
            self.visual_after += after
            self.last = report


@dataclass(frozen=True)
class Summary:
    """What a handle did so far; prints as a table.

    Args:
        methods: the methods' parameters.
        model_type: the family.
        calls: number of prefills in which tokens were removed.
        own_ms: host time spent in tokred's hooks over all calls, in milliseconds.
        stages: visual tokens before and after each step of the last prefill.
        visual_tokens_before: visual tokens of all prefills.
        visual_tokens_after: those that survived the last step.
        token_layers: mean share of visual tokens over the layers of the decoder, or of an encoder that stands alone, in
            the last call.
        layer_lengths: sequence length that each of these layers received in the last call.
    """

    methods: list[dict[str, Any]]
    model_type: str
    calls: int
    own_ms: float
    stages: list[StageReport] = field(default_factory=list)
    visual_tokens_before: int = 0
    visual_tokens_after: int = 0
    token_layers: float = 1.0
    layer_lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, methods: list[dict[str, Any]], model_type: str, statistics: Statistics) -> Summary:
        """Read the statistics of a handle."""
        last = statistics.last
        return cls(
            methods=methods,
            model_type=model_type,
            calls=statistics.calls,
            own_ms=statistics.seconds * 1000,
            stages=list(last.stages) if last else [],
            visual_tokens_before=statistics.visual_before,
            visual_tokens_after=statistics.visual_after,
            token_layers=last.token_layers if last else 1.0,
            layer_lengths=list(last.layer_lengths) if last else [],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the summary in builtin types."""
        return asdict(self)

    def __str__(self) -> str:
        names = ", ".join(method["method"] for method in self.methods)
        lines = [f"tokred: {names} on {self.model_type}"]
        if not self.calls:
            lines.append("no call with media yet: nothing was removed")
        else:
            header = ("stage", "method", "layer", "tokens before", "tokens after")
            rows = [
                (
                    stage.stage,
                    stage.method,
                    "-" if stage.layer is None else str(stage.layer),
                    _counts(stage.tokens_before),
                    _counts(stage.tokens_after),
                )
                for stage in self.stages
            ]
            widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
            for row in (header, *rows):
                lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        share = self.visual_tokens_after / self.visual_tokens_before if self.visual_tokens_before else 1.0
        lines.append(
            f"{self.calls} prefills: {self.visual_tokens_before} -> {self.visual_tokens_after} visual tokens "
            f"({share:.1%}), token_layers {self.token_layers:.3f}, own time {self.own_ms:.1f} ms"
        )
        return "\n".join(lines)


def draw_overlay(report: CallReport, image: Image, sample: int, item: int) -> Image:
    """Return a picture of what was kept of an item: dropped cells dark, merged ones tinted like the one they joined.

    Args:
        report: the call.
        image: the picture that was shown to the model.
        sample: row of the batch.
        item: number of the item in its sample.

    Raises:
        UnsupportedInputError: there is no such item, or its grid is not known.
    """
    from PIL import Image as Images
    from PIL import ImageDraw

    spans = [span for span in report.spans if span.sample == sample]
    if not 0 <= item < len(spans):
        raise UnsupportedInputError(f"sample {sample} has {len(spans)} media items, so there is no item {item}")
    span = spans[item]
    cells = _cells(span.item)
    whole = cells[:, 1] == 0
    rows, columns = int(cells[whole, 2].max()) + 1, int(cells[whole, 3].max()) + 1
    if rows < 1 or columns < 1:
        raise UnsupportedInputError(f"the grid of item {item} is not known, so there is nothing to draw it on")

    kept = {token.position for token in report.trace()[sample]}
    targets = report.merged_into()[sample]
    scale = max(1, 448 // max(image.size))
    canvas = image.convert("RGB").resize((image.width * scale, image.height * scale), Images.Resampling.NEAREST)
    shade = Images.new("RGBA", canvas.size)
    draw = ImageDraw.Draw(shade)
    absorbing = {int(targets[position]) for position in range(span.start, span.stop)} & kept
    colours = {position: _COLOURS[index % len(_COLOURS)] for index, position in enumerate(sorted(absorbing))}
    for offset in range(span.length):
        _, view, row, column = cells[offset].tolist()
        if view != 0 or row < 0:
            continue
        position = span.start + offset
        box = (
            column * canvas.width // columns,
            row * canvas.height // rows,
            (column + 1) * canvas.width // columns - 1,
            (row + 1) * canvas.height // rows - 1,
        )
        if position in kept:
            colour = colours.get(position)
            draw.rectangle(box, outline=(*(colour or (255, 255, 255)), 255), width=2 if colour else 1)
        elif int(targets[position]) in colours:
            draw.rectangle(box, fill=(*colours[int(targets[position])], 110))
        else:
            draw.rectangle(box, fill=(12, 14, 20, 200))
    return Images.alpha_composite(canvas.convert("RGBA"), shade).convert("RGB")


# Okabe and Ito's palette without black: told apart by colour-blind readers too.
_COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)


def _cells(item: MediaItem) -> torch.Tensor:
    """Return frame, view, row and column of an item's tokens, -1 for what is not known, int64 (length, 4)."""
    if item.cells is None:
        return torch.tensor([0, 0, -1, -1]).expand(item.length, 4)
    return item.cells()


def _counts(values: list[int]) -> str:
    if len(set(values)) == 1:
        return str(values[0]) if len(values) == 1 else f"{values[0]} x {len(values)}"
    return ", ".join(map(str, values))
