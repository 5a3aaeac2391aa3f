"""`tokred bench kernels`: the operations under the methods, each beside what one would write without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tokred import kernels
from tokred.errors import ParameterError
from tokred.kernels.attention_columns import naive as naive_columns
from tokred.kernels.cover import naive as naive_cover
from tokred.kernels.drop_similar import naive as naive_drop
from tokred.kernels.farthest_points import naive as naive_points
from tokred.kernels.match import naive as naive_match
from tokred.kernels.nearest import naive as naive_nearest

from .measure import bootstrap, interleave, machine, median, now, pin_threads, place

WIDTH, HEADS = 1024, 16
KEEP = 0.25

# What an operation and its peer are called with, and what the peer is.
Case = tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def _torch_gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def cases(tokens: int, where: tuple[torch.device, torch.dtype]) -> dict[str, Case]:
    """Return each operation with its peer, and the arguments that a method would give them.

    Args:
        tokens: number of visual tokens, at least 4.
        where: device and dtype of the arguments.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(*where)

    count = round(KEEP * tokens)
    x, scores = noise(1, tokens, WIDTH), noise(1, tokens)
    order = kernels.topk_indices(scores, tokens)
    index = torch.randperm(tokens, generator=generator)[:count].sort().values.to(where[0]).unsqueeze(0)
    query, key = (noise(1, HEADS, tokens, WIDTH // HEADS) for _ in range(2))
    attention = query, key, (WIDTH // HEADS) ** -0.5
    return {
        "attention_columns": (
            "all probabilities at once",
            kernels.attention_columns,
            naive_columns.attention_columns,
            attention,
        ),
        "cover": ("all gains anew for each pick", kernels.cover, naive_cover.cover, (x, scores.abs(), count)),
        "drop_similar": (
            "all similarities anew in each round",
            kernels.drop_similar,
            naive_drop.drop_similar,
            (x, order, count, 8),
        ),
        "farthest_points": (
            "all distances anew for each pick",
            kernels.farthest_points,
            naive_points.farthest_points,
            (x, count),
        ),
        "gather": ("torch.gather", kernels.gather, _torch_gather, (x, index)),
        "match": ("all pairs at once", kernels.match, naive_match.match, (x[:, count:], x[:, :count])),
        "nearest": ("all pairs at once", kernels.nearest, naive_nearest.nearest, (x[:, :count], x, min(32, count))),
        "topk_indices": ("torch.topk, ties in any order", kernels.topk_indices, torch.topk, (scores, count)),
    }


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device) -> float:
    start = now(device)
    function(*arguments)
    return now(device) - start


def bench_kernels(
    tokens: list[int],
    *,
    rounds: int,
    threads: int | None,
    device: str,
    dtype: str,
    progress: Callable[[int, str], Callable[[], Any]],
) -> dict[str, Any]:
    """Time every operation and its peer in turn, in random order.

    Args:
        tokens: numbers of visual tokens, each at least 4.
        rounds: number of rounds, at least 1.
        threads: number of compute threads, None for one per core.
        device: torch device.
        dtype: a key of `measure.DTYPES`.
        progress: takes a number of runs and what they are, returns what to call after each.

    Returns:
        `rows` with medians in milliseconds and the peer's time over ours with its 95 % interval, the `settings`, and
        the `machine`.

    Raises:
        ParameterError: a number, the dtype or the device is not allowed.
    """
    if min(tokens, default=0) < 4:
        raise ParameterError(f"tokens={tokens} are not all at least 4")
    if rounds < 1:
        raise ParameterError(f"rounds={rounds} is not at least 1")
    where = place(device, dtype)
    pin_threads(threads)
    rows = []
    for length in tokens:
        made = cases(length, where)
        runs = {}
        for name, (_, ours, peer, arguments) in made.items():
            runs[name, "ours"] = partial(_seconds, ours, arguments, where[0])
            runs[name, "peer"] = partial(_seconds, peer, arguments, where[0])
        for run in runs.values():
            run()
        seen = interleave(runs, rounds, 0, progress(rounds * len(runs), f"{length} tokens"))
        for name, (peer_name, *_) in made.items():
            ours, peer = seen[name, "ours"], seen[name, "peer"]
            ratio = bootstrap([theirs / own for own, theirs in zip(ours, peer, strict=True)])
            rows.append(
                {
                    "operation": name,
                    "tokens": length,
                    "ms": median(ours) * 1e3,
                    "peer": peer_name,
                    "peer_ms": median(peer) * 1e3,
                    "peer_over_ours": ratio,
                }
            )
    settings = {"rounds": rounds, "device": device, "dtype": dtype, "width": WIDTH, "heads": HEADS, "keep": KEEP}
    return {"rows": rows, "settings": settings, "machine": machine()}


def kernels_table(result: dict[str, Any]) -> Table:
    """Return what `bench_kernels` returned as a table."""
    settings = result["settings"]
    table = Table(
        title=f"operations on {settings['device']}, {settings['dtype']}, width {WIDTH}, keep {KEEP:g}",
        caption=f"median of {settings['rounds']} interleaved rounds; above 1: faster than the peer",
    )
    for name in ("operation", "tokens", "ms", "peer", "peer ms", "peer / ours (95 %)"):
        table.add_column(name, justify="left" if name in ("operation", "peer") else "right")
    for row in result["rows"]:
        ratio, low, high = row["peer_over_ours"]
        table.add_row(
            row["operation"],
            str(row["tokens"]),
            f"{row['ms']:.3f}",
            row["peer"],
            f"{row['peer_ms']:.3f}",
            f"{ratio:.2f} ({low:.2f}-{high:.2f})",
        )
    return table
