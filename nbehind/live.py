"""The live view of a run: a rich display on a terminal, plain lines elsewhere. Draws a View (live_data.py), decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nbehind.live_data import Row, View, eta_s, number, tokens_per_s

log = logging.getLogger(__name__)

REDRAW_S = 0.25
PLAIN_LINE_S = 1.0
STAGE_LINE_S = 5.0
BARS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 32


class Display(Protocol):
    """Where a run is shown."""

    def update(self, view: View) -> None:
        """Show the view; called many times a second, draws when it is due."""
        ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def make_display(stream: TextIO, *, plain: bool) -> Display:
    """A rich display if `stream` is a terminal and `plain` is not asked for."""
    if plain or not stream.isatty():
        return SturdyDisplay(PlainDisplay(stream))
    return SturdyDisplay(RichDisplay(Console(file=stream)))


class SturdyDisplay:
    """Falls silent when its stream breaks (a closed terminal or pipe): the run goes on."""

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self.broken = False

    def update(self, view: View) -> None:
        self._guarded(lambda: self._inner.update(view))

    def note(self, text: str) -> None:
        log.info("%s", text)
        self._guarded(lambda: self._inner.note(text))

    def close(self) -> None:
        self._guarded(self._inner.close)

    def _guarded(self, draw: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            draw()
        except (OSError, ValueError) as error:  # ValueError: written to after it was closed
            self.broken = True
            log.warning("the display is gone: %s", error)


class PlainDisplay:
    """A line a step, at most one a second; before the first step the services' newest log lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last_time = float("-inf")
        self._last_step: object = None
        self._waiting: View | None = None
        self._shown: dict[str, str] = {}
        self._stage_time = float("-inf")

    def update(self, view: View) -> None:
        now = self._clock()
        if not view.rows:
            if now - self._stage_time >= STAGE_LINE_S:
                self._stage_time = now
                self._stages(view)
            return
        step = view.rows[-1].get("step")
        if step == self._last_step:
            return
        self._waiting = view
        if now - self._last_time >= PLAIN_LINE_S:
            self._print_waiting(now)

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        self._print_waiting(self._clock())

    def _print_waiting(self, now: float) -> None:
        view, self._waiting = self._waiting, None
        if view is not None:
            self._last_time, self._last_step = now, view.rows[-1].get("step")
            self._write(step_line(view))

    def _stages(self, view: View) -> None:
        for service in view.services:
            if service.last_line and self._shown.get(service.name) != service.last_line:
                self._shown[service.name] = service.last_line
                self._write(f"{service.name}: {message_of(service.last_line)}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RichDisplay:
    """A block at the bottom of the terminal, redrawn four times a second by the caller's own loop."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self._waiting: View | None = None
        self._live = Live(
            console=console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def update(self, view: View) -> None:
        self._waiting = view
        if self._clock() - self._last >= REDRAW_S:
            self._draw_waiting()

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)

    def close(self) -> None:
        try:
            self._draw_waiting()
        finally:
            self._live.stop()

    def _draw_waiting(self) -> None:
        view, self._waiting = self._waiting, None
        if view is not None:
            self._last = self._clock()
            self._live.update(render(view), refresh=True)


def step_line(view: View) -> str:
    """`step 12/100  reward 0.531 ± 0.402  lag 1 (mean 0.62)  1,532 tok/s  open 32 (queued 3)  eta 2:31`."""
    row = view.rows[-1]
    parts = [
        step_text(view),
        f"reward {shown(number(row, 'reward_mean'))} ± {shown(number(row, 'reward_std'))}",
        f"lag {shown(number(row, 'lag_max'), 0)} (mean {shown(number(row, 'lag_mean'), 2)})",
        f"{shown(tokens_per_s(view.rows), 0)} tok/s",
        f"open {shown(number(row, 'queue', 'open'), 0)} (queued {shown(number(row, 'queue', 'queued'), 0)})",
        f"loss {shown(number(row, 'loss'), 4)}",
    ]
    left = eta_s(view.rows, view.total_steps)
    return "  ".join(
        [*parts, *([f"eta {duration(left)}"] if left is not None else []), *([view.problem] if view.problem else [])]
    )


def step_text(view: View) -> str:
    done = int(number(view.rows[-1], "step") or 0) + 1 if view.rows else 0
    return f"step {done}/{view.total_steps}" if view.total_steps else f"step {done}"


def render(view: View) -> RenderableType:
    """The block of the rich display."""
    blocks: list[RenderableType] = [_head(view)]
    if view.rows:
        blocks.append(_numbers(view.rows))
    else:
        blocks.append(_services(view))
    if view.producers:
        blocks.append(_producers(view))
    restarting = [s for s in view.services if s.state not in ("running", "left")] if view.rows else []
    blocks += [Text(f"{s.name}: {s.state}", style="yellow") for s in restarting]
    if view.problem:
        blocks.append(Text(view.problem, style="bold red"))
    return Group(*blocks)


def _head(view: View) -> RenderableType:
    left = eta_s(view.rows, view.total_steps)
    table = Table.grid(padding=(0, 2))
    done = int(number(view.rows[-1], "step") or 0) + 1 if view.rows else 0
    bar = ProgressBar(total=view.total_steps or None, completed=done, width=24, pulse=False)
    eta = f"eta {duration(left)}" if left is not None else ""
    cells: list[RenderableType] = [Text(view.run, style="bold"), Text(view.phase, style="cyan"), Text(step_text(view))]
    table.add_row(*cells, *([bar] if view.total_steps else []), Text(eta, style="green"))
    return table


def _numbers(rows: Sequence[Row]) -> RenderableType:
    row = rows[-1]
    rewards = [n for r in list(rows)[-SPARK_STEPS:] if (n := number(r, "reward_mean")) is not None]
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "reward", f"{shown(number(row, 'reward_mean'))} ± {shown(number(row, 'reward_std'))}", sparkline(rewards)
    )
    table.add_row("lag", f"max {shown(number(row, 'lag_max'), 0)}", f"mean {shown(number(row, 'lag_mean'), 2)}")
    depth = {k: shown(number(row, "queue", k), 0) for k in ("open", "queued", "leased", "delivered")}
    table.add_row(
        "queue",
        f"open {depth['open']}",
        f"queued {depth['queued']}, leased {depth['leased']}, delivered {depth['delivered']}",
    )
    table.add_row(
        "trained",
        f"{shown(tokens_per_s(rows), 0)} tok/s",
        f"loss {shown(number(row, 'loss'), 4)}, length {shown(number(row, 'length_mean'), 1)}",
    )
    return table


def _producers(view: View) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("producer", "version", "tok/s", "in flight", "stage"):
        table.add_column(name)
    for name, info in sorted(view.producers.items()):
        table.add_row(
            *(
                escape(info_text)
                for info_text in (name, *(info.get(k, "") for k in ("version", "tokens_per_s", "in_flight", "stage")))
            )
        )
    return table


def _services(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for service in view.services:
        table.add_row(
            escape(service.name),
            service.state,
            Text(message_of(service.last_line), style="dim", overflow="ellipsis", no_wrap=True),
        )
    return table


def message_of(line: str) -> str:
    """A log line without its time, level and service (see logs.py); any other line as it is."""
    time_part, _, rest = line.partition(" ")
    _, colon, message = rest.partition(": ")
    return message if colon and time_part.endswith("Z") and time_part[:1].isdigit() else line


def shown(value: float | None, digits: int = 3) -> str:
    """`1,532` or `0.531`; `–` if there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float]) -> str:
    """One block character a value, from the least to the greatest; values that are not finite are left out."""
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1) + 0.5)] if span else BARS[3] for v in finite)
