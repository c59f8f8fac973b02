"""The errors a user can cause. The CLI prints their message as one line, without a traceback unless `--debug`."""


class UserError(ValueError):
    """Input that can't be used as given. The message names the key, file, row or rank, the value and the remedy."""


class ConfigError(UserError):
    """A config with one or more problems, found before any worker starts.

    Attributes:
        problems: one line per problem; each names the dotted key, its value and the remedy.
    """

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class RunError(RuntimeError):
    """A run that started and can't go on: a dead worker, a wait over its limit, a disk that is full."""


class PeerError(RunError):
    """Another rank failed, so this one can't finish what takes both. The cause is with the other."""


class MemoryExhaustedError(RunError):
    """A forward or backward pass that did not fit. Smaller microbatches may: nothing but the open step is lost."""
