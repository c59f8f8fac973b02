"""The progress of a run: one live line on a terminal, a line now and then in a log file."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_LINES_PER_LOG = 50
"""How many lines a run leaves in a log file, about."""
_BAR_CELLS = 16
_STYLES = {
    "reward": "bold magenta",
    "loss": "bold",
    "speed": "green",
    "eta": "cyan",
    "val": "bold magenta",
    "dropped": "yellow",
}


def format_seconds(seconds: float) -> str:
    """`75` as `1:15`, `3725` as `1:02:05`, `90000` as `1d 1:00:00`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


class ProgressLine:
    """Shows the events of a run: call it with a mapping after steps, inside `with`.

    An event has `step` and `max_steps`, and may have `reward`, `loss`, `val_loss` or `val_reward` (the latest), `lr`,
    `tokens_per_s`, `eta_s` (seconds), `epoch` (from 0), `dropped` (rows by reason, so far) and `notices` (all so far).
    On a terminal there is one line, drawn again for each event and, until the first one, a spinner; the last state
    stays. Elsewhere there are about 50 plain lines per run, with the first, the last and every validation among them.
    Each notice is printed once, above or between.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_step = 0
        self._num_notices = 0
        self._last_validation: float | None = None
        self._live: Live | None = None
        if console.is_terminal:
            waiting = Spinner("dots", text=Text("starting workers"), style="cyan")
            self._live = Live(waiting, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        for notice in event.get("notices", ())[self._num_notices :]:
            self._num_notices += 1
            self._console.print(Text(notice, style="yellow"), soft_wrap=True)
        if self._live is not None:
            self._live.transient = False
            self._live.update(self._line(event), refresh=True)
        elif self._is_due(event):
            self._last_step, self._last_validation = event["step"], _validation(event)
            words = [f"step {event['step']}/{event['max_steps']}", *self._facts(event).values()]
            self._console.print(Text("  ".join(words)), soft_wrap=True)

    def _is_due(self, event: Mapping[str, Any]) -> bool:
        """Whether a log file gets a line: steps may come twice or be passed over, as their caller polls."""
        step, max_steps = event["step"], event["max_steps"]
        if step <= self._last_step:
            return False
        stride = max(1, max_steps // _LINES_PER_LOG)
        validated = _validation(event) not in (None, self._last_validation)
        return self._last_step == 0 or step >= max_steps or step // stride > self._last_step // stride or validated

    def _facts(self, event: Mapping[str, Any]) -> dict[str, str]:
        """What the line says after the step, the most wanted first: a narrow terminal loses the tail."""
        facts = {}
        if event.get("reward") is not None:
            facts["reward"] = f"reward {event['reward']:.3f}"
        if event.get("loss") is not None:
            facts["loss"] = f"loss {event['loss']:.4f}"
        if event.get("tokens_per_s") is not None:
            facts["speed"] = f"{event['tokens_per_s']:,.0f} tok/s"
        if event.get("eta_s") is not None:
            facts["eta"] = f"{format_seconds(event['eta_s'])} left"
        if event.get("val_loss") is not None:
            facts["val"] = f"val {event['val_loss']:.4f}"
        if event.get("val_reward") is not None:
            facts["val"] = f"val {event['val_reward']:.3f}"
        if event.get("lr") is not None:
            facts["lr"] = f"lr {event['lr']:.2e}"
        if event.get("epoch") is not None:
            facts["epoch"] = f"epoch {event['epoch'] + 1}"
        if dropped := sum(event.get("dropped", {}).values()):
            facts["dropped"] = f"dropped {dropped:,}"
        return facts

    def _line(self, event: Mapping[str, Any]) -> Text:
        step, max_steps = event["step"], event["max_steps"]
        full, empty = ("━", "╌") if self._console.encoding.startswith("utf") else ("#", "-")
        done = round(_BAR_CELLS * step / max(1, max_steps))
        line = Text(f"step {step:,}/{max_steps:,}  ", no_wrap=True, overflow="ellipsis")
        line.append(full * done, style="green").append(empty * (_BAR_CELLS - done), style="bright_black")
        for name, words in self._facts(event).items():
            line.append("  ").append(words, style=_STYLES.get(name, "dim"))
        return line


def _validation(event: Mapping[str, Any]) -> float | None:
    return event.get("val_reward", event.get("val_loss"))
