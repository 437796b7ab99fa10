"""The result of a run for people: a table for the terminal, and report.html, one file that needs no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbehind.errors import InputError
from nbehind.live import duration, shown
from nbehind.live_data import Row, number, parse_row
from nbehind.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 600
PHASES = ("wait", "fetch", "train", "publish", "checkpoint")
COLORS = ("#4477aa", "#ccbb44", "#228833", "#aa3377", "#bbbbbb", "#66ccee")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse } th, td { text-align: left; padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #ddd }
th { font-weight: 600 } img { max-width: 100% } .warn { color: #a33 }
"""


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what is worth reading first; what a summary lacks shows as –."""

    def value(*path: str, digits: int = 0) -> str:
        return shown(number(summary, *path), digits)

    seconds = number(summary, "seconds", "total")
    overlapped = number(summary, "overlapped_steps")
    counts = [f"{name} {value(name)}" for name in ("issued", "trained", "filtered", "dead_lettered", "open")]
    return [
        ("run", str(summary.get("run", "–"))),
        ("ended", str(summary.get("exit_reason", "–"))),
        ("steps", value("steps")),
        (
            "reward, first → last tenth",
            f"{value('reward_mean_first', digits=3)} → {value('reward_mean_last', digits=3)}",
        ),
        ("lag, most", f"{value('lag_max')}  (n_behind {value('n_behind')})"),
        ("lag by tokens", _histogram_text(summary.get("lag_histogram"))),
        ("requests", f"{counts[0]} = {' + '.join(counts[1:])}"),
        ("overlapped steps", f"{overlapped:.0%}" if overlapped is not None else "–"),
        ("time", duration(seconds) if seconds is not None else "–"),
        ("tokens trained", f"{value('tokens')}  ({value('tokens_per_second')} per second)"),
    ]


def summary_table(summary: Mapping[str, Any]) -> str:
    """The rows as aligned text, a line each."""
    rows = summary_rows(summary)
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def write_report(run_dir: Path) -> Path:
    """Write report.html into the run folder and return its path. InputError if there is nothing to report."""
    folder = RunFolder(run_dir)
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: no such folder; give the folder of a run, such as runs/demo")
    rows, bad_lines = read_metrics(folder.metrics)
    summary = folder.read_summary()
    if not rows and not summary:
        raise InputError(f"{run_dir}: no readable metrics.jsonl or summary.json; has the run trained a step yet?")
    warnings = []
    if bad_lines:
        warnings.append(f"{bad_lines} lines of metrics.jsonl could not be read and are left out.")
    if not summary:
        warnings.append("There is no readable summary.json: the run is going on, or ended without one.")
    if not rows:
        warnings.append("metrics.jsonl has no steps: there is nothing to plot.")
    page = _page(str(summary.get("run", run_dir.name)), summary, rows, warnings)
    temporary = folder.report.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(folder.report)
    return folder.report


def read_metrics(path: Path) -> tuple[list[Row], int]:
    """The rows that can be read, and the number of lines that cannot."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    return rows, sum(bool(line.strip()) for line in lines) - len(rows)


def series(rows: Sequence[Row], *path: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have the value; means over equal spans of steps when there are many."""
    points = [(s, v) for r in rows if (v := number(r, *path)) is not None and (s := number(r, "step")) is not None]
    size = -(-len(points) // MAX_POINTS) or 1
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [sum(s for s, _ in c) / len(c) for c in chunks], [sum(v for _, v in c) / len(c) for c in chunks]


def lag_counts(rows: Sequence[Row]) -> dict[int, float]:
    """Tokens by lag over all rows."""
    counts: dict[int, float] = {}
    for row in rows:
        histogram = row.get("lag_histogram")
        for lag in histogram if isinstance(histogram, Mapping) else ():
            if str(lag).isdecimal():
                counts[int(lag)] = counts.get(int(lag), 0.0) + (number(row, "lag_histogram", lag) or 0.0)
    return dict(sorted(counts.items()))


def _page(run: str, summary: Mapping[str, Any], rows: Sequence[Row], warnings: Sequence[str]) -> str:
    title = html.escape(f"nbehind run {run}")
    parts = [f"<h1>{title}</h1>", *(f'<p class="warn">{html.escape(w)}</p>' for w in warnings)]
    if summary:
        cells = "".join(
            f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in summary_rows(summary)
        )
        parts.append(f"<table>{cells}</table>")
    plots: tuple[tuple[str, Callable[[Axes, Sequence[Row]], None]], ...] = (
        ("Reward", _plot_reward),
        ("Lag of the trained tokens, by step", _plot_lag),
        ("Lag of the trained tokens, all steps", _plot_lag_histogram),
        ("Throughput", _plot_throughput),
        ("Seconds of a step, by phase", _plot_phases),
    )
    for name, draw in plots if rows else ():
        parts.append(f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="{_image(draw, rows)}">')
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _image(draw: Callable[[Axes, Sequence[Row]], None], rows: Sequence[Row]) -> str:
    """A plot as a data: URL."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=130, layout="constrained")
    axes = figure.subplots()
    draw(axes, rows)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _plot_reward(axes: Axes, rows: Sequence[Row]) -> None:
    steps, means = series(rows, "reward_mean")
    axes.plot(steps, means, color=COLORS[0], label="mean of the step")
    _, spreads = series(rows, "reward_std")
    if len(spreads) == len(means):
        low = [m - s for m, s in zip(means, spreads, strict=True)]
        high = [m + s for m, s in zip(means, spreads, strict=True)]
        axes.fill_between(steps, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="± standard deviation")
    names = sorted({name for r in rows if isinstance(p := r.get("reward_parts"), Mapping) for name in p})
    for color, name in zip(COLORS[1:], names[:5] if len(names) > 1 else [], strict=False):
        axes.plot(*series(rows, "reward_parts", name), color=color, linewidth=1, label=f"part {name}")
    axes.set(xlabel="step", ylabel="reward")


def _plot_lag(axes: Axes, rows: Sequence[Row]) -> None:
    for color, key, label in ((COLORS[3], "lag_max", "most"), (COLORS[0], "lag_mean", "mean")):
        axes.plot(*series(rows, key), color=color, label=label)
    axes.set(xlabel="step", ylabel="lag (steps)")


def _plot_lag_histogram(axes: Axes, rows: Sequence[Row]) -> None:
    counts = lag_counts(rows)
    total = sum(counts.values()) or 1.0
    bars = axes.bar([str(lag) for lag in counts], [c / total for c in counts.values()], color=COLORS[0], width=0.6)
    axes.bar_label(bars, [f"{c / total:.1%}" for c in counts.values()])
    axes.set(xlabel="lag (steps)", ylabel="share of tokens")


def _plot_throughput(axes: Axes, rows: Sequence[Row]) -> None:
    rates = [
        {"step": r["step"], "rate": (number(r, "tokens") or 0.0) / seconds}
        for r in rows
        if (seconds := number(r, "seconds", "total")) is not None and seconds > 0
    ]
    axes.plot(*series(rates, "rate"), color=COLORS[2])
    axes.set(xlabel="step", ylabel="tokens trained per second", ylim=(0, None))


def _plot_phases(axes: Axes, rows: Sequence[Row]) -> None:
    filled = [{"step": r["step"], **{p: number(r, "seconds", p) or 0.0 for p in PHASES}} for r in rows]
    steps = series(filled, "step")[0]
    if steps:
        axes.stackplot(steps, *(series(filled, p)[1] for p in PHASES), labels=PHASES, colors=COLORS, linewidth=0)
    axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))


def _histogram_text(histogram: Any) -> str:
    counts = lag_counts([{"lag_histogram": histogram}])
    total = sum(counts.values())
    return ", ".join(f"{lag}: {count / total:.1%}" for lag, count in counts.items()) if total else "–"
