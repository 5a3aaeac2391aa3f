"""What several methods share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import topk_indices
from ..method import BudgetMethod, Context, ModelShape, Need, Selection, Stage, Step, check_layer


def attention_score(rows: torch.Tensor) -> torch.Tensor:
    """Return the head mean of attention rows.

    Args:
        rows: attention probabilities of one query per group, (G, heads, N).

    Returns:
        (G, N), in the dtype of the rows.
    """
    return rows.mean(dim=1)


def survivors(score: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tokens with the largest scores in ascending order.

    Args:
        score: (G, N); the lowest index wins ties.
        count: how many survive, 0 to N.

    Returns:
        int64 of shape (G, count).
    """
    return topk_indices(score, count).sort(dim=-1).values


def places_of(kept: torch.Tensor) -> torch.Tensor:
    """Return the places of the kept tokens in ascending order, -1 behind those of items that keep fewer.

    Args:
        kept: which tokens are kept, bool of shape (G, N).

    Returns:
        int64 of shape (G, k), where k is the largest number of kept tokens.
    """
    length = kept.shape[1]
    places = torch.arange(length, device=kept.device).masked_fill(~kept, length).sort(dim=1).values
    places = places[:, : int(kept.sum(1).max())]
    return places.masked_fill(places == length, -1)


def evenly(length: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` of `length` places at even distances: floor((i + 1/2) * length / count), int64 (count,)."""
    return (2 * torch.arange(count, device=device) + 1) * length // max(1, 2 * count)


def check_tower_layer(layer: int | None) -> None:
    """Raise `ParameterError` unless `layer` is None or may be a layer of a tower, 0-based."""
    if layer is not None and (not isinstance(layer, int) or layer < 0):
        raise ParameterError(f"layer={layer!r} is neither None nor a layer of the tower")


def tower_layer(layer: int, shape: ModelShape, name: str) -> int:
    """Return `layer`, 0 if it is negative because the tower has too few layers for a default.

    Raises:
        ParameterError: the tower of the model has no such layer.
    """
    depth = shape.tower_layers
    if layer >= max(1, depth):
        raise ParameterError(f"{name}: layer={layer} lies outside 0..{depth - 1} of a tower with {depth} layers")
    return max(0, layer)


def _floor(x: float) -> int:
    """Round down what is no whole number but for the error of a power."""
    return math.floor(x + 1e-9)


@dataclass(frozen=True, kw_only=True)
class StagedMethod(BudgetMethod):
    """A method that drops visual tokens before several decoder layers, by a score that it computes there.

    Step s leaves `keep ** exponents[s]` of the visual tokens of the prompt, rounded down; the last leaves the budget.

    Args:
        keep: share of the visual tokens that survive the last step, in (0, 1].
        layers: the decoder layers whose input is shortened, ascending, at least 1. None is the released choice, at the
            same shares of the decoder's depth.
        reference_exact: as released, round the last step down too, so that no token may be left.
    """

    depths: ClassVar[tuple[float, ...]]
    """The released layers as shares of the decoder's depth."""
    released: ClassVar[tuple[float, ...]] = ()
    """Shares that a released table leaves: the shape of the schedule for as many steps; others are geometric."""
    needs: ClassVar[frozenset[Need]]
    """What the score observes."""
    layers: tuple[int, ...] | None = None
    reference_exact: bool = False

    def _validate(self) -> None:
        super()._validate()
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers is None:
            return
        whole = isinstance(self.layers, tuple) and all(isinstance(layer, int) for layer in self.layers)
        if not whole or not self.layers or min(self.layers) < 1 or list(self.layers) != sorted(set(self.layers)):
            raise ParameterError(f"layers={self.layers!r} is not an ascending list of positive integers")

    def score(self, context: Context) -> torch.Tensor:
        """Return how much each visual token matters, (G, N)."""
        raise NotImplementedError

    def exponents(self, steps: int) -> tuple[float, ...]:
        """Return the power of `keep` that is left after each of so many steps: ascending, the last one 1."""
        if steps != len(self.released):
            return tuple((step + 1) / steps for step in range(steps))
        return tuple(math.log(share) / math.log(self.released[-1]) for share in self.released)

    def plan(self, shape: ModelShape) -> tuple[Step, ...]:
        layers = self.layers
        if layers is None:
            layers = tuple(sorted({max(1, round(shape.num_layers * depth)) for depth in self.depths}))
        steps = []
        for layer, exponent in zip(layers, self.exponents(len(layers)), strict=True):
            check_layer(layer, shape, self.name)
            select, count = partial(self._select, exponent), partial(self.step_count, exponent)
            steps.append(Step(Stage.DECODER_LAYER, select, self.needs, layer, count))
        return tuple(steps)

    def count(self, length: int) -> int:
        """Return the number of survivors among `length` tokens: as every budget, but as released rounded down."""
        if not self.reference_exact or self.num_tokens is not None:
            return super().count(length)
        return _floor(length * self.keep)

    def step_count(self, exponent: float, total: int, length: int) -> int:
        """Return how many of `length` tokens, of `total` in the prompt, survive the step with this exponent."""
        return min(length, max(self.count(total), self.scheduled(exponent, total)))

    def scheduled(self, exponent: float, total: int) -> int:
        """Return how many of the `total` tokens in the prompt the step with this exponent leaves, rounded down."""
        left = self.keep if self.num_tokens is None else min(1.0, self.num_tokens / total)
        return _floor(total * left**exponent)

    def _select(self, exponent: float, context: Context) -> Selection:
        score = self.score(context)
        return Selection(survivors(score, self.step_count(exponent, context.total, score.shape[1])))
