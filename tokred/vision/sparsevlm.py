"""SparseVLM: the text tokens that look like the picture rate its tokens, and some of the dropped ones are merged."""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ParameterError
from ..kernels import gather, topk_indices
from ..method import Context, Need, Selection
from ._common import StagedMethod, survivors


def relevance(media: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the share of each text token in the likeness of the media tokens to the text.

    Args:
        media: input embeddings of the media tokens, (G, M, D).
        text: those of the text tokens, (G, T, D).

    Returns:
        float32 of shape (G, T), rows sum to 1.
    """
    return (media @ text.mT).softmax(dim=-1, dtype=torch.float32).mean(dim=1)


def raters_of(share: torch.Tensor) -> torch.Tensor:
    """Return which text tokens have more than the mean share (G, T), all where none has, bool of shape (G, T)."""
    above = share > share.mean(dim=1, keepdim=True)
    return above | ~above.any(dim=1, keepdim=True)


def rated_by_head(rows: torch.Tensor, raters: torch.Tensor) -> torch.Tensor:
    """Return the mean attention of the raters (G, T) by head, (G, heads, N), from rows (G, heads, T, N)."""
    weight = raters / raters.sum(dim=1, keepdim=True).clamp(min=1)
    return (weight.to(rows.dtype)[:, None, None] @ rows).squeeze(2)


def strongest_heads(rated: torch.Tensor, count: int) -> torch.Tensor:
    """Return the heads that pay the media most attention (G, heads, N), in that order, int64 of shape (G, count)."""
    return topk_indices(rated.sum(dim=2), count)


def pool_size(dropped: int) -> tuple[int, int]:
    """Return how many of so many dropped tokens the release merges, and into how many."""
    pool = int(0.3 * dropped) + 1
    return pool, pool // 10 + 1


def merge_clusters(x: torch.Tensor, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge tokens into the means of clusters around density peaks (DPC-kNN).

    Of equally dense tokens the first counts as the denser one; the release adds noise instead.

    Args:
        x: hidden states, (G, M, D).
        clusters: how many, 1 to M.

    Returns:
        The cluster of each token, int64 of shape (G, M), and the merged tokens, (G, clusters, D), the most peaked
        cluster first.
    """
    exact = x.float()
    # Differences of large products would not tell close tokens apart.
    distance = torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist") / math.sqrt(x.shape[2])
    density = (-distance.topk(clusters, largest=False).values.square().mean(dim=2)).exp()
    rank = density.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    denser = rank.unsqueeze(1) < rank.unsqueeze(2)
    farthest = distance.amax(dim=(1, 2), keepdim=True)
    peak = density * distance.where(denser, farthest).amin(dim=2)
    centres = topk_indices(peak, clusters)
    assigned = gather(distance, centres).argmin(dim=1)
    assigned.scatter_(1, centres, torch.arange(clusters, device=x.device).expand_as(centres))
    member = torch.nn.functional.one_hot(assigned, clusters).mT.to(exact.dtype)
    merged = member @ exact / (member.sum(dim=2, keepdim=True) + 1e-6)
    return assigned, merged.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class SparseVLM(StagedMethod):
    """After each of some layers, keep the visual tokens that receive most attention from the raters: the text tokens
    behind the picture whose input embeddings are more like its own than the mean.

    The default steps are those of LLaVA, before layers 3, 7 and 16 of 32. The release has a table of budgets for each
    target; three steps have the shape of that for 192 tokens here, which leaves 52, 35 and 20 %. The default is
    SparseVLM+; `recycle=True, heads=1.0, positions="renumber"` is SparseVLM. The release of SparseVLM+ also divides
    the attention by what RoPE alone would give. Those divisors may be zero or negative, and are left out.

    Args:
        recycle: merge the best of the dropped tokens into a few that survive too, each in the place of its earliest
            member. The budget includes them. With a budget of one token nothing is merged.
        heads: share of the heads that count, those with most attention from the raters to the picture, in (0, 1].
        reference_exact: as released, every budget is rounded down, so that no token may be left, merged tokens come on
            top of it, and every step drops a token even if there is room for all. `keep=1.0` still keeps everything.
    """

    name: ClassVar[str] = "sparsevlm"
    source: ClassVar[str] = "SparseVLM (arXiv 2410.04417), SparseVLM+ (Gumpest/SparseVLMs), specs/vision.md section 11"
    depths: ClassVar[tuple[float, ...]] = (3 / 32, 7 / 32, 16 / 32)
    released: ClassVar[tuple[float, ...]] = (300 / 576, 200 / 576, 118 / 576)
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEXT_ROWS, Need.EMBEDDINGS, Need.TEXT})
    recycle: bool = False
    heads: float = 14 / 32

    def _validate(self) -> None:
        super()._validate()
        if not isinstance(self.heads, int | float) or not 0 < self.heads <= 1:
            raise ParameterError(f"heads={self.heads!r} is not a share in (0, 1]")

    def count(self, length: int) -> int | None:  # type: ignore[override]
        """Return the number of survivors among `length` tokens; None under `reference_exact`, where each step adds."""
        if not self.reference_exact:
            return super().count(length)
        return length if self.num_tokens is None and self.keep == 1 else None

    def step_count(self, exponent: float, total: int, length: int) -> int:
        return sum(self.split(exponent, total, length))

    def split(self, exponent: float, total: int, length: int) -> tuple[int, int]:
        """Return how many tokens a step keeps and how many it makes of others; arguments as in `step_count`."""
        if self.reference_exact:
            if self.count(length) == length:
                return length, 0
            kept = min(self.scheduled(exponent, total), length - 1)
            return kept, pool_size(length - kept)[1] if self.recycle else 0
        left = super().step_count(exponent, total, length)
        if not self.recycle or left in (1, length):
            return left, 0
        # What is made of the dropped tokens grows more slowly than they do, so that every number is met.
        dropped = next(n for n in itertools.count(length - left) if n - pool_size(n)[1] == length - left)
        kept = max(1, length - dropped)
        return kept, left - kept

    def score(self, context: Context) -> torch.Tensor:
        media, text = context.observe(Need.EMBEDDINGS), context.observe_text(Need.EMBEDDINGS)
        return self.rate(context.observe(Need.TEXT_ROWS), raters_of(relevance(media, text)))

    def rate(self, rows: torch.Tensor, raters: torch.Tensor) -> torch.Tensor:
        """Return the attention that media tokens receive from the raters (G, T) in the heads that count, (G, N).

        Args:
            rows: attention of the text tokens to the media tokens, (G, heads, T, N).
            raters: which text tokens count, bool of shape (G, T).
        """
        rated = rated_by_head(rows, raters)
        return gather(rated, strongest_heads(rated, max(1, round(self.heads * rated.shape[1])))).mean(dim=1)

    def _select(self, exponent: float, context: Context) -> Selection:
        score = self.score(context)
        kept, merged = self.split(exponent, context.total, score.shape[1])
        keep = survivors(score, kept)
        return recycle(context.hidden, score, keep, merged) if merged else Selection(keep)


def recycle(hidden: torch.Tensor, score: torch.Tensor, keep: torch.Tensor, clusters: int) -> Selection:
    """Merge the best of the tokens that are not kept into clusters.

    Args:
        hidden: hidden states of all tokens, (G, N, D).
        score: how much each token matters, (G, N).
        keep: the tokens that stay as they are, ascending, int64 of shape (G, k).
        clusters: how many tokens are made of others.

    Returns:
        The k + clusters survivors, those that were made in the places of their earliest members.
    """
    groups, length = score.shape
    pool = survivors(score.scatter(1, keep, -torch.inf), pool_size(length - keep.shape[1])[0])
    assigned, merged = merge_clusters(gather(hidden, pool), clusters)
    earliest = pool.new_full((groups, clusters), length).scatter_reduce_(1, assigned, pool, "amin")
    places, order = torch.cat([keep, earliest], dim=1).sort(dim=1)
    rows = gather(torch.cat([gather(hidden, keep), merged], dim=1), order)
    merged_into = torch.full_like(score, -1, dtype=torch.long).scatter_(1, pool, earliest.gather(1, assigned))
    return Selection(places, rows, merged_into.scatter_(1, earliest, -1))
