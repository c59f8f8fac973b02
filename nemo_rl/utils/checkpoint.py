"""Checkpoint folders: written aside, made durable, renamed last, and thinned out by the keep rules.

    <checkpoint_dir>/step_<N>/training_info.json   counters and metrics, JSON
                              config.yaml          what the run was started with
                              policy/{weights,optimizer,tokenizer}, value/..., loaders/...   written by their owners
                              digests.json         sha256 of each of these files, taken when all were there

`checkpoint_folder` tells the other names that a folder may have on its way.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from nemo_rl.utils.checkpoint_digests import find_damage
from nemo_rl.utils.checkpoint_folder import CheckpointFolder
from nemo_rl.utils.checkpoint_retention import steps_to_keep
from nemo_rl.utils.config import ConfigModel
from nemo_rl.utils.disk import describe_save_failure
from nemo_rl.utils.errors import RunError, UserError
from nemo_rl.utils.json_values import json_value
from nemo_rl.utils.timer import convert_to_seconds

logger = logging.getLogger(__name__)

TRAINING_INFO = "training_info.json"
RUN_CONFIG = "config.yaml"
_NAMED_FILES = 10


class CheckpointingConfig(ConfigModel):
    """When to save, where, and which checkpoints to keep."""

    enabled: bool = True
    """False = nothing is saved and nothing is resumed from."""
    checkpoint_dir: str
    """Folder of the `step_<N>` folders; a run that finds some there resumes from the newest."""
    start_fresh: bool = False
    """Start at step 0 and move checkpoints that are in `checkpoint_dir` into its `set_aside_<K>`. Each start does so:
    give it on the command line, once."""
    metric_name: str | None = None
    """Ranks checkpoints for `keep_top_k`: `train:<name>` or `val:<name>`; null ranks by age."""
    higher_is_better: bool | None = None
    """Needed with `metric_name`."""
    save_period: Annotated[int, Field(ge=1)]
    """Save every so many steps; the last step is always saved."""
    keep_top_k: Annotated[int, Field(ge=1)] | None = None
    """Keep this many of the periodic checkpoints, the best or else the newest; null = all of them."""
    ft_save_period: Annotated[int, Field(ge=1)] | None = None
    """Save every so many steps besides, to lose less to a crash."""
    ft_keep_latest_k: Annotated[int, Field(ge=1)] | None = None
    """Keep this many of the newest checkpoints of any kind; null = no rule."""
    checkpoint_must_save_by: str | None = None
    """Save and end the run after this much time, `DD:HH:MM:SS`."""
    save_optimizer: bool = True
    """False makes smaller checkpoints, from which a resumed run starts with a fresh optimizer."""

    @field_validator("metric_name")
    @classmethod
    def _names_its_source(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(train|val):.+", value):
            raise ValueError(f"expected train:<name>, val:<name> or null, got {value!r}")
        return value

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            convert_to_seconds(value)
        return value

    @model_validator(mode="after")
    def _metric_has_a_direction(self) -> Self:
        if self.metric_name is not None and self.higher_is_better is None:
            raise ValueError("metric_name is set, so higher_is_better must be true or false")
        return self


class CheckpointManager:
    """The one writer of a checkpoint folder; any process may read through a manager of its own.

    At most one save is in the background. Its failure is raised by the next call that waits for it:
    `begin_finalization`, `finalize_pending`, `finalize_checkpoint`, `shutdown`.
    """

    def __init__(self, config: CheckpointingConfig):
        self._config = config
        self._folder = CheckpointFolder(Path(config.checkpoint_dir).absolute())
        self._pending: threading.Thread | None = None
        self._pending_error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @contextmanager
    def saving(self, path: Path) -> Generator[None, None, None]:
        """Around everything that writes into `path`, from `init_tmp_checkpoint` to its finalization.

        Raises:
            RunError: in place of any `Exception` of the body. It names the checkpoint that still loads, and a full disk
                by its file system. `path` is removed, so that a partial folder doesn't hold the room.
        """
        try:
            yield
        except Exception as error:
            # Owners write through many libraries, each with its own exception for a failed write.
            failure = describe_save_failure(error, self._folder.path, self._folder.newest())
            shutil.rmtree(path, ignore_errors=True)
            raise failure from error

    def is_due(self, step: int, *, forced: bool) -> bool:
        """Whether `step` is saved: the last step of a run and the one at its time limit are `forced`."""
        config = self._config
        return config.enabled and (
            forced
            or step % config.save_period == 0
            or (config.ft_save_period is not None and step % config.ft_save_period == 0)
        )

    def metric_of(self, metrics: Mapping[str, Any], val_names: Collection[str]) -> dict[str, float]:
        """`checkpointing.metric_name` and its value in one step's metrics; `{}` where it is not configured or not due.

        To be asked every step, so that a name that no step produces fails on step 1 instead of at the first save.

        Args:
            val_names: metrics that only steps which validate have.

        Raises:
            UserError: no step has such a metric; names those there are.
        """
        name = self._config.metric_name
        if not self._config.enabled or name is None:
            return {}
        kind, _, key = name.partition(":")
        if key in metrics:
            return {name: float(metrics[key])}
        if kind == "val" and key in val_names:
            return {}
        names = val_names if kind == "val" else [k for k, v in metrics.items() if isinstance(v, int | float)]
        raise UserError(
            f"checkpointing.metric_name: no step has a metric {key!r}; there are {', '.join(sorted(names))}"
        )

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: BaseModel | Mapping[str, Any] | None = None
    ) -> Path:
        """Makes `tmp_step_<step>` with its `training_info.json` and, if given, `config.yaml`; returns its path.

        A folder of the same name that an earlier save left behind is removed. Tensors, arrays and NumPy numbers in
        `training_info` become plain numbers; NaN and infinities, which JSON lacks, become null.

        Raises:
            RunError: nothing can be written there.
        """
        path = self._folder.temporary(step)
        with self.saving(path):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            info = json_value(training_info, non_finite=lambda _: None)
            (path / TRAINING_INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
            if run_config is not None:
                (path / RUN_CONFIG).write_text(_as_yaml(run_config), encoding="utf-8")
        return path

    def finalize_checkpoint(self, path: str | Path) -> None:
        """Makes a complete `tmp_step_<N>` durable, gives it its name, then deletes what the keep rules give up.

        Raises:
            RunError: the folder can't be synced or renamed, or the save before this one failed.
        """
        self.finalize_pending()
        self._finalize(Path(path))

    def begin_finalization(self, path: str | Path, wait_fn: Callable[[], object] | None = None) -> None:
        """`finalize_checkpoint` in the background, after `wait_fn` (the end of asynchronous writes) has returned.

        Raises:
            RunError: the save before this one failed.
        """
        self.finalize_pending()

        def work() -> None:
            try:
                if wait_fn is not None:
                    with self.saving(Path(path)):
                        wait_fn()
                self._finalize(Path(path))
            except BaseException as error:  # noqa: BLE001 (raised again by finalize_pending)
                self._pending_error = error

        self._pending = threading.Thread(target=work, name="checkpoint-finalizer", daemon=True)
        self._pending.start()

    @property
    def has_pending_finalization(self) -> bool:
        """True while a save is in the background or its failure was not raised yet."""
        return self._pending is not None

    def finalize_pending(self) -> None:
        """Waits for the save in the background. Raises `RunError` when it failed."""
        if self._pending is None:
            return
        self._pending.join()
        error, self._pending, self._pending_error = self._pending_error, None, None
        if isinstance(error, RunError):
            raise error
        if error is not None:
            raise RunError(f"saving a checkpoint under {self._folder.path} failed: {error}") from error

    def shutdown(self) -> None:
        """Waits for the save in the background; the manager can be used again afterwards."""
        self.finalize_pending()

    def get_latest_checkpoint_path(self) -> Path | None:
        """The newest complete checkpoint, None when there is none. Unfinished folders are passed over and named."""
        newest = self._folder.newest()
        for path in self._folder.unfinished():
            logger.warning("%s is an unfinished save and is passed over; the newest complete one is %s", path, newest)
        return newest

    def verify(self, path: Path) -> None:
        """Compares each file of a complete checkpoint with the digest that was taken when it was saved.

        Reads the whole checkpoint. One without digests, as older versions made them, is only warned about.

        Raises:
            UserError: files are damaged, missing or not part of it. It names them, and says how to resume from the
                newest checkpoint before it that is intact.
        """
        logger.info("comparing every file of %s with its digest", path)
        damage = find_damage(path)
        if damage is None:
            logger.warning("%s has no digests.json (an older version made it), so it is loaded unchecked", path)
        if not damage:
            return
        earlier = [folder for _, folder in sorted(self._folder.complete().items(), reverse=True)]
        earlier = earlier[earlier.index(path) + 1 :] if path in earlier else []
        intact = next((folder for folder in earlier if not find_damage(folder)), None)
        more = f"; and {len(damage) - _NAMED_FILES} more" if len(damage) > _NAMED_FILES else ""
        remedy = (
            f"Rename it to {path.name}.damaged, and the run resumes from {intact}, the newest that is intact"
            if intact is not None
            else "No earlier one is intact; checkpointing.start_fresh=true moves it aside and starts at step 0"
        )
        raise UserError(f"{path} is damaged: {'; '.join(damage[:_NAMED_FILES])}{more}. {remedy}")

    def set_aside(self) -> Path | None:
        """Moves all checkpoints into a new folder `set_aside_<K>` below `checkpoint_dir`; None when there are none.

        Raises:
            RunError: they can't be moved; the newest is still in its place then.
        """
        try:
            aside = self._folder.set_aside()
        except OSError as error:
            raise RunError(f"the checkpoints under {self._folder.path} can't be moved aside: {error}") from error
        if aside is not None:
            logger.warning("checkpointing.start_fresh: the checkpoints of the earlier run are now in %s", aside)
        return aside

    def get_best_checkpoint_path(self) -> Path | None:
        """The complete checkpoint with the best `metric_name`, the newer of two equal ones; without any, the newest."""
        complete = self._folder.complete()
        metrics = self._metrics(complete)
        known = {step: value for step, value in metrics.items() if value is not None}
        if not known:
            logger.warning(
                "no checkpoint under %s has the metric %s; the newest counts as the best",
                self._folder.path,
                self._config.metric_name,
            )
            return self._folder.newest()
        sign = 1 if self._config.higher_is_better else -1
        return complete[max(known, key=lambda step: (sign * known[step], step))]

    def get_resume_paths(
        self, last: str | Path | None, *, model_component: Literal["policy", "value"] = "policy"
    ) -> tuple[Path | None, Path | None]:
        """Where a role's weights and optimizer are in the checkpoint `last`; (None, None) without a checkpoint.

        The second is None, with a warning, when the checkpoint holds no optimizer state.

        Raises:
            UserError: the checkpoint has no weights of that role.
        """
        if last is None:
            return None, None
        weights = Path(last) / model_component / "weights"
        optimizer = Path(last) / model_component / "optimizer"
        if not weights.is_dir():
            raise UserError(f"{weights}: no such folder, so the {model_component} can't be resumed from {last}")
        if not optimizer.is_dir():
            logger.warning("%s holds no optimizer state of the %s: its optimizer starts afresh", last, model_component)
            return weights, None
        return weights, optimizer

    def load_training_info(self, path: str | Path | None) -> dict[str, Any] | None:
        """What `init_tmp_checkpoint` was given, None without a checkpoint. Raises `UserError` when it can't be read."""
        if path is None:
            return None
        file = Path(path) / TRAINING_INFO
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: can't be read ({error}); resume from another step or remove {path}") from error
        if not isinstance(info, dict):
            raise UserError(f"{file}: expected a JSON object, got a {type(info).__name__}")
        return info

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Deletes the checkpoints that no keep rule protects; a deletion that fails is a warning.

        `steps_to_keep` states the rules; `exclude_latest` protects the newest whatever they say.
        """
        complete = self._folder.complete()
        keep = steps_to_keep(
            self._metrics(complete),
            save_period=self._config.save_period,
            higher_is_better=bool(self._config.higher_is_better),
            keep_top_k=self._config.keep_top_k,
            keep_latest_k=self._config.ft_keep_latest_k,
            keep_newest=exclude_latest,
        )
        for step in sorted(complete.keys() - keep):
            self._folder.delete(complete[step])

    def _finalize(self, path: Path) -> None:
        with self.saving(path):
            final = self._folder.publish(path)
        logger.info("checkpoint complete: %s", final)
        self._folder.remove_leftovers(before=int(final.name.removeprefix("step_")))
        self.remove_old_checkpoints()

    def _metrics(self, complete: Mapping[int, Path]) -> dict[int, float | None]:
        """Step -> its `metric_name`; None where it is missing, null or not a number, or no metric is configured."""
        name = self._config.metric_name
        if name is None:
            return dict.fromkeys(complete)
        return {step: _number(path, name) for step, path in complete.items()}


def _number(path: Path, name: str) -> float | None:
    try:
        value = json.loads((path / TRAINING_INFO).read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None  # an unreadable checkpoint ranks last; loading it reports the fault
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return float(value) if is_number else None


def _as_yaml(run_config: BaseModel | Mapping[str, Any]) -> str:
    plain = run_config.model_dump(mode="json") if isinstance(run_config, BaseModel) else json_value(run_config)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
