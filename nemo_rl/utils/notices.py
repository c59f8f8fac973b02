"""The log of a controller's process, whose warnings the user's terminal shows as well."""

import logging

_MOST = 100
"""Notices kept: a run that warns at every step would fill the terminal and each answer to a question for progress."""


class Notices(logging.Handler):
    """Keeps the warnings of this library, the first hundred.

    Attributes:
        texts: them, oldest first, as one line each; the last one of a full list says that more are left out.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: tuple[str, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging` for each record of this level and above."""
        if len(self.texts) < _MOST:
            last = len(self.texts) == _MOST - 1
            text = "further warnings are not shown" if last else record.getMessage()
            self.texts = (*self.texts, " ".join(text.split()))


def configure_controller_logging() -> Notices:
    """Sends the records of this process to its log file, and its warnings to the notices that are returned."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s controller %(levelname)s %(message)s")
    notices = Notices()
    logging.getLogger("nemo_rl").addHandler(notices)
    return notices
