"""Summary table and report: right numbers, odd content, and a page that needs no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbehind.errors import InputError
from nbehind.report import MAX_POINTS, lag_counts, read_metrics, series, summary_rows, summary_table, write_report

SUMMARY: dict[str, Any] = {
    "run": "demo",
    "exit_reason": "done",
    "steps": 60,
    "reward_mean_first": 0.312,
    "reward_mean_last": 0.941,
    "lag_max": 1,
    "n_behind": 1,
    "lag_histogram": {"0": 100, "1": 300},
    "issued": 960,
    "trained": 950,
    "filtered": 8,
    "dead_lettered": 2,
    "open": 0,
    "overlapped_steps": 0.98,
    "seconds": {"total": 125.4},
    "tokens": 12345,
    "tokens_per_second": 98.4,
}


def row(step: int, **more: Any) -> dict[str, Any]:
    seconds = {"wait": 0.1, "fetch": 0.1, "train": 0.2, "publish": 0.0, "checkpoint": 0.0, "total": 0.4}
    return {
        "step": step,
        "t": 1e9 + step,
        "reward_mean": step / 10,
        "reward_std": 0.1,
        "lag_max": 1,
        "lag_mean": 0.5,
        "tokens": 40,
        "seconds": seconds,
        **more,
    }


def run_dir(folder: Path, rows: list[Any], summary: Any = None) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_table_says_what_the_summary_says() -> None:
    rows = dict(summary_rows(SUMMARY))
    assert rows["reward, first → last tenth"] == "0.312 → 0.941"
    assert rows["requests"] == "issued 960 = trained 950 + filtered 8 + dead_lettered 2 + open 0"
    assert rows["lag by tokens"] == "0: 25.0%, 1: 75.0%"
    assert rows["overlapped steps"] == "98%"
    assert rows["time"] == "2:05"
    assert rows["tokens trained"] == "12,345  (98 per second)"
    assert summary_table(SUMMARY).count("\n") == len(rows)


@pytest.mark.parametrize(
    "summary",
    [{}, {"steps": "many", "seconds": 3, "lag_histogram": [1], "overlapped_steps": None, "reward_mean_first": None}],
)
def test_a_summary_with_holes_is_shown_with_dashes(summary: dict[str, Any]) -> None:
    assert "steps                       –" in summary_table(summary)


def test_the_report_is_one_file_without_network(tmp_path: Path) -> None:
    path = write_report(run_dir(tmp_path, [row(s) for s in range(20)], SUMMARY | {"run": "<script>alert(1)</script>"}))
    page = path.read_text()
    assert path == tmp_path / "report.html"
    assert page.count('src="data:image/png;base64,') == 5
    assert "0.312 → 0.941" in page
    assert "http" not in page
    assert "<script" not in page
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_that_goes_on_has_a_report_too(tmp_path: Path) -> None:
    page = write_report(run_dir(tmp_path, [row(0)])).read_text()
    assert "no readable summary.json" in page


def test_odd_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    odd = [
        row(0),
        [1],
        "text",
        {"no": "step"},
        {"step": "3"},
        {"step": True},
        row(1, reward_mean=float("nan"), lag_histogram=7),
    ]
    run_dir(tmp_path, odd, SUMMARY)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n\n{"step": 2, "rew')
    rows, bad = read_metrics(tmp_path / "metrics.jsonl")
    assert ([r["step"] for r in rows], bad) == ([0, 1], 7)
    assert "7 lines of metrics.jsonl could not be read" in write_report(tmp_path).read_text()


def test_rows_that_have_nothing_but_a_step(tmp_path: Path) -> None:
    assert write_report(run_dir(tmp_path, [{"step": 0}, {"step": 1, "seconds": {"total": 0}}])).exists()


def test_summary_without_steps(tmp_path: Path) -> None:
    assert "nothing to plot" in write_report(run_dir(tmp_path, [], SUMMARY)).read_text()


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        write_report(tmp_path / "none")
    with pytest.raises(InputError, match=r"no readable metrics.jsonl or summary.json"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 3')  # torn
    with pytest.raises(InputError, match="has the run trained a step yet"):
        write_report(tmp_path)


def test_long_runs_are_drawn_from_means() -> None:
    steps, values = series([row(s) for s in range(MAX_POINTS * 2 + 1)], "reward_mean")
    assert len(steps) == len(values) == 401  # 1,201 rows in chunks of 3
    assert steps[0] == 1.0
    assert values[0] == pytest.approx(0.1)  # means of steps 0, 1, 2 and of rewards 0.0, 0.1, 0.2


def test_lag_counts_add_up() -> None:
    assert lag_counts(
        [row(0, lag_histogram={"0": 1, "1": 2}), row(1, lag_histogram={"1": 3, "x": 9, "-1": 4}), row(2)]
    ) == {0: 1.0, 1: 5.0}
