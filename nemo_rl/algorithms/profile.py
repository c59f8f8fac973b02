"""The steps that `logger.profile_steps` names, timed by phase on every worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.models.driver import ModelDriver
    from nemo_rl.utils.logger import Logger


class StepProfiler:
    """Opens a profile on the workers before such a step and logs it after.

    Args:
        steps: counted from 1.
        roles: whose workers are timed, by name.
    """

    def __init__(self, steps: list[int], roles: Mapping[str, ModelDriver], logger: Logger):
        self._steps, self._roles, self._logger = frozenset(steps), dict(roles), logger

    def begin(self, step: int) -> None:
        """Before step `step`; nothing unless it is to be profiled."""
        if step in self._steps:
            for driver in self._roles.values():
                driver.start_profile()

    def end(self, step: int) -> None:
        """After step `step` and what belongs to it; writes one line per role."""
        if step in self._steps:
            for role, driver in self._roles.items():
                self._logger.log_profile(step, role, driver.stop_profile())
