"""Where the command line writes: results on stdout; progress, logs and errors on stderr."""

from __future__ import annotations

import functools
import logging
import warnings

from rich.console import Console
from rich.text import Text


@functools.cache
def err_console() -> Console:
    """The one console on stderr.

    The progress line and the log records share it, so that a record scrolls above the line instead of tearing it.
    """
    return Console(stderr=True)


class ConsoleHandler(logging.Handler):
    """Writes a record as one unwrapped line, coloured by its level on a terminal."""

    _STYLES = ((logging.ERROR, "bold red"), (logging.WARNING, "yellow"), (logging.INFO, ""), (logging.NOTSET, "dim"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = next(style for level, style in self._STYLES if record.levelno >= level)
            err_console().print(Text(self.format(record), style=style), soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's own rule: a record that can't be written never ends the program
            self.handleError(record)


def configure_logging(*, debug: bool) -> None:
    """Send log records to the console on stderr: ours from INFO, others' from WARNING; with `debug` all of them."""
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s" if debug else "%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("nemo_rl").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)
    if not debug:
        # Third parties warn about their own internals; a user can act on none of it.
        warnings.simplefilter("ignore")


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print one unwrapped line: a path or a message that the terminal wraps, not we, can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print `name  value` lines with the values in one column."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        console.print(Text.assemble((f"  {name:<{width}}  ", "dim"), value), soft_wrap=True)
