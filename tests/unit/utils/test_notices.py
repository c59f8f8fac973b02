"""Which records of a controller become notices. That the terminal shows them: `test_sft_resume`, `test_progress`."""

import logging
from collections.abc import Iterator

import pytest

from nemo_rl.utils.notices import Notices, configure_controller_logging


@pytest.fixture
def notices() -> Iterator[Notices]:
    handler = configure_controller_logging()
    yield handler
    logging.getLogger("nemo_rl").removeHandler(handler)


def test_our_warnings_become_lines_and_nothing_else_does(notices: Notices) -> None:
    log = logging.getLogger("nemo_rl.algorithms.anything")
    log.info("a step")
    logging.getLogger("other").warning("theirs")
    log.warning("step %d changed\nnothing", 3)
    log.error("gone")
    assert notices.texts == ("step 3 changed nothing", "gone")


def test_a_run_that_warns_all_the_time_says_so_once(notices: Notices) -> None:
    log = logging.getLogger("nemo_rl")
    for step in range(300):
        log.warning("step %d", step)
    assert len(notices.texts) == 100
    assert notices.texts[-2:] == ("step 98", "further warnings are not shown")
