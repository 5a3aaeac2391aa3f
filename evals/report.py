"""Tables for the terminal and the Pareto plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .bench import BAR_MEDIAN, BAR_ROW, BAR_ROW_UPPER, MIN_ROUNDS, SHORT_TOLERANCE
from .evaluate import at_equal_token_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EQUAL_SHARES = (0.75, 0.6, 0.5, 0.25, 0.1)
"""Shares of token-layers at which methods are compared."""
FLOORS = ("random", "uniform")
"""Methods that look at nothing: drawn in grey."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""
MARKERS = "osD^vPX*"


def _interval(figures: dict[str, float]) -> str:
    return f"{figures['accuracy']:.3f} ({figures['lo']:.2f}-{figures['hi']:.2f})"


def eval_tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of `tokred eval`: figures per setting, accuracy per kind, accuracy at equal token-layers.

    Args:
        result: what `evaluate` returned.
    """
    settings, rows = result["settings"], result["rows"]
    main = Table(title=f"{settings['questions']} held-out questions, {settings['dtype']} on {settings['device']}")
    for name in ("method", "keep"):
        main.add_column(name, no_wrap=True)
    batch = settings["batch"]
    for name in (
        "accuracy (95 %)",
        "vs stock (95 %)",
        "visual tokens",
        "token_layers",
        f"prefill ms x{batch}",
        "speed-up",
        "prefill ms x1",
        "speed-up",
        f"own ms x{batch}",
    ):
        main.add_column(name, justify="right")
    for row in rows:
        stock = row["method"] == "stock"
        main.add_row(
            row["method"],
            f"{row['keep']:g}",
            _interval(row),
            "-" if stock else f"{row['delta']:+.3f} ({row['delta_lo']:+.2f} to {row['delta_hi']:+.2f})",
            f"{row['visual_tokens']:.0f}",
            f"{row['token_layers']:.3f}",
            f"{row['prefill_ms']:.1f}",
            "-" if stock else f"{row['speedup']:.2f}x",
            f"{row['prefill_ms_1']:.1f}",
            "-" if stock else f"{row['speedup_1']:.2f}x",
            "-" if stock else f"{row['own_ms']:.2f}",
        )

    kinds = Table(title="exact match by kind of question (95 % interval)")
    kinds.add_column("method", no_wrap=True)
    kinds.add_column("keep")
    for kind, figures in rows[0]["kinds"].items():
        kinds.add_column(f"{kind} (n={figures['questions']})", justify="right")
    for row in rows:
        cells = [f"{f['accuracy']:.2f} ({f['lo']:.2f}-{f['hi']:.2f})" for f in row["kinds"].values()]
        kinds.add_row(row["method"], f"{row['keep']:g}", *cells)

    equal = Table(title="accuracy at equal token_layers, linear between measured points")
    equal.add_column("method", no_wrap=True)
    for share in EQUAL_SHARES:
        equal.add_column(f"{share:g}", justify="right")
    for method, values in at_equal_token_layers(rows, EQUAL_SHARES).items():
        equal.add_row(method, *("-" if value is None else f"{value:.3f}" for value in values))
    return [main, kinds, equal]


def bench_tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of `tokred bench prefill`, one for each model.

    Args:
        result: what `bench_prefill` returned.
    """
    tables, settings = [], result["settings"]
    for model, about in result["about"].items():
        table = Table(
            title=f"{model}: {about}",
            caption=f"ms of decoder prefill, batch 1, {settings['dtype']} on {settings['device']}; decode in ms a "
            "token; short: a natively short prompt; same: a stock cache of the same length in every layer",
        )
        for name in (
            "method",
            "keep",
            "token_layers",
            "stock",
            "tokred",
            "ideal",
            "short input",
            "achieved/ideal (95 %)",
            "overhead % stock",
            "overhead % ideal",
            "ideal/short decoder",
            "decode",
            "decode short",
            "decode same",
            "bar",
        ):
            table.add_column(name, justify="left" if name == "method" else "right")
        for row, detail in zip(result["rows"], result["details"], strict=True):
            if row["model"] != model:
                continue
            ratio = detail["ideal_over_short_decoder"]
            table.add_row(
                row["method"],
                f"{row['keep']:g}",
                f"{row['token_layers']:.3f}",
                f"{row['stock_ms']:.1f}",
                f"{row['tokred_ms']:.1f}",
                f"{row['ideal_ms']:.1f}",
                f"{row['short_input_ms']:.1f}",
                f"{row['achieved_over_ideal']:.3f} ({row['achieved_lo']:.3f}-{row['achieved_hi']:.3f})",
                f"{row['overhead_pct_of_stock']:.1f}",
                f"{row['overhead_pct_of_ideal']:.1f}",
                "-" if ratio is None else f"{ratio:.3f}",
                f"{detail['decode_ms']:.2f}",
                f"{detail['decode_short_ms']:.2f} ({detail['decode_over_short'][0]:.2f}x)",
                f"{detail['decode_same_cache_ms']:.2f} ({detail['decode_over_same_cache'][0]:.2f}x)",
                "met" if detail["passes"] else "missed",
            )
        tables.append(table)
    return tables


def bench_notes(result: dict[str, Any]) -> list[str]:
    """Return the lines under the tables: what was refused, and how the rows stand to the bar."""
    notes = []
    for model, refused in result["refused"].items():
        notes += [f"{model}: {method} not measured: {reason}" for method, reason in refused.items()]
    found, settings = result["verdict"], result["settings"]
    if found["median_over_rows"] is None:
        return [*notes, "nothing was measured"]
    notes.append(
        f"bar: median over rows >= {BAR_MEDIAN:g}; each row's median >= {BAR_ROW:g} and the upper end of its "
        f"interval >= {BAR_ROW_UPPER:g}; at least {MIN_ROUNDS} rounds"
    )
    notes.append(
        f"{'met' if found['passes'] else 'missed'}: median over {len(result['rows'])} rows "
        f"{found['median_over_rows']:.3f}, {settings['rounds']} rounds"
        + (f"; rows below: {', '.join(found['failing'])}" if found["failing"] else "")
    )
    checked = [d for d in result["details"] if d["ideal_over_short_decoder"] is not None]
    if checked:
        far = ", ".join(found["short_check_failing"])
        notes.append(
            f"check of the ideal against a natively short stock decoder, within {SHORT_TOLERANCE:.0%}, for "
            f"{len(checked)} rows that act before layer 0: " + (f"not within for {far}" if far else "all within")
        )
    for key, other in (
        ("decode_over_short", "a natively short cache"),
        ("decode_over_same_cache", "a stock cache of the same length in every layer"),
    ):
        slower = [f"{d['model']}/{d['method']}/{d['keep']:g}" for d in result["details"] if d[key][1] > 1]
        notes.append(
            f"decode against {other} (95 % interval): "
            + (f"slower for {', '.join(slower)}" if slower else "none is slower")
        )
    if settings["smoke"]:
        notes.append("smoke run on tiny models: it tests the benchmark, its times mean nothing")
    return notes


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Return the places moved apart until neighbours keep a gap, in the given order, as near as one pass allows."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    shift = sum(m - p for m, p in zip(moved, places, strict=True)) / max(1, len(places))
    return [place - shift for place in moved]


def _label_ends(axes: Axes, ends: dict[str, tuple[float, float]], colours: dict[str, str], gap: float) -> None:
    """Write each method's name left of its leftmost point, in columns of points that are near each other."""
    columns: list[list[str]] = []
    for method in sorted(ends, key=lambda name: ends[name][0]):
        if columns and ends[method][0] - ends[columns[-1][0]][0] < 0.15:
            columns[-1].append(method)
        else:
            columns.append([method])
    for column in columns:
        left = min(ends[method][0] for method in column)
        for method, height in zip(column, _spread([ends[method][1] for method in column], gap), strict=True):
            axes.annotate(
                method,
                xy=ends[method],
                xytext=(left - 0.045, height),
                ha="right",
                va="center",
                fontsize=9,
                color=colours[method],
                arrowprops={"arrowstyle": "-", "color": colours[method], "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
            )


def pareto_plot(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy against the share of token-layers, one line per method, with stock's level.

    Args:
        result: what `evaluate` returned.
        path: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    stock = next(row for row in rows if row["method"] == "stock")
    methods = list(dict.fromkeys(row["method"] for row in rows if row is not stock))
    palette = iter(COLOURS * (1 + len(methods) // len(COLOURS)))
    greys = iter(("#555555", "#999999") * len(methods))
    colours = {method: next(greys if method in FLOORS else palette) for method in methods}

    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    axes.axhspan(stock["lo"], stock["hi"], color="#000000", alpha=0.06, lw=0)
    axes.axhline(stock["accuracy"], color="#000000", lw=1, ls=(0, (4, 3)))
    ends = {}
    for index, method in enumerate(methods):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["token_layers"])
        xs, ys = [row["token_layers"] for row in own], [row["accuracy"] for row in own]
        ends[method] = (xs[0], ys[0])
        errors = [[y - row["lo"] for y, row in zip(ys, own, strict=True)], [row["hi"] - row["accuracy"] for row in own]]
        axes.errorbar(xs, ys, yerr=errors, fmt="none", ecolor=colours[method], alpha=0.25, elinewidth=1)
        axes.plot(
            xs,
            ys,
            color=colours[method],
            marker=MARKERS[index % len(MARKERS)],
            ms=5,
            lw=1.2 if method in FLOORS else 1.8,
            ls=(0, (2, 2)) if method in FLOORS else "-",
        )
    low = min(row["lo"] for row in rows)
    high = max(row["hi"] for row in rows)
    margin = 0.04 * (high - low) + 0.01
    axes.set_ylim(max(0.0, low - margin), min(1.02, high + 2 * margin))
    axes.set_xlim(-0.12, 1.03)
    axes.annotate(
        f"stock, all tokens: {stock['accuracy']:.3f}",
        xy=(-0.11, stock["accuracy"]),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=9,
        va="bottom",
    )
    bottom, top = axes.get_ylim()
    _label_ends(axes, ends, colours, 0.045 * (top - bottom))
    axes.set_xticks([0, 0.1, 0.25, 0.5, 0.75, 1.0])
    axes.set_xlabel("token_layers: mean share of visual tokens over the decoder layers")
    axes.set_ylabel("exact match")
    settings = result["settings"]
    axes.set_title(
        f"{settings['task']}: {settings['questions']} held-out questions, bars are 95 % intervals",
        fontsize=10,
        loc="left",
    )
    axes.grid(color="#000000", alpha=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
