"""The folders of one `checkpoint_dir`, and the order of renames that keeps a complete one there at every moment.

- `step_<N>`: complete, always.
- `tmp_step_<N>`: being written, or a save that was cut short.
- `old_step_<N>`: the former `step_<N>` while its successor takes the name.
- `trash_step_<N>`: being deleted.
- `set_aside_<K>/step_<N>`: of a run that another one replaced; neither resumed nor deleted.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from pathlib import Path

from nemo_rl.utils.checkpoint_digests import write_digests
from nemo_rl.utils.disk import sync_tree

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """Finds, publishes and deletes checkpoints below `path`."""

    def __init__(self, path: Path):
        self.path = path

    def complete(self) -> dict[int, Path]:
        """Step -> folder of every complete checkpoint.

        `old_step_<N>` counts while there is no `step_<N>`: a kill between the two renames leaves it so.
        """
        found: dict[int, Path] = {}
        if self.path.is_dir():
            for prefix in ("old_step", "step"):
                for folder in self.path.iterdir():
                    match = re.fullmatch(rf"{prefix}_(\d+)", folder.name)
                    if match is not None and folder.is_dir():
                        found[int(match[1])] = folder
        return found

    def newest(self) -> Path | None:
        """The complete checkpoint of the latest step."""
        complete = self.complete()
        return complete[max(complete)] if complete else None

    def unfinished(self) -> list[Path]:
        """The saves that are being written or were cut short."""
        return sorted(self.path.glob("tmp_step_*"))

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f"tmp_step_{step}"

    def publish(self, temporary: Path) -> Path:
        """Adds the digests of a written `tmp_step_<N>`, makes it durable, then gives it its name; returns its new path.

        Raises `OSError`.
        """
        match = re.fullmatch(r"tmp_step_(\d+)", temporary.name)
        assert match is not None, f"{temporary} is not a tmp_step_<N>"
        final, former = self.path / f"step_{match[1]}", self.path / f"old_step_{match[1]}"
        write_digests(temporary)
        sync_tree(temporary)
        if final.exists():
            shutil.rmtree(former, ignore_errors=True)
            final.rename(former)
        temporary.rename(final)
        sync_tree(self.path, recursive=False)
        return final

    def set_aside(self) -> Path | None:
        """Moves all complete checkpoints into a new `set_aside_<K>`; returns it, None without any. Raises `OSError`.

        The newest goes last: whatever cuts the moves short, the next start still finds it.
        """
        complete = self.complete()
        if not complete:
            return None
        candidates = (self.path / f"set_aside_{number}" for number in itertools.count(1))
        aside = next(candidate for candidate in candidates if not candidate.exists())
        aside.mkdir()
        for step in sorted(complete):
            complete[step].rename(aside / f"step_{step}")
        sync_tree(aside, recursive=False)
        sync_tree(self.path, recursive=False)
        return aside

    def delete(self, folder: Path) -> None:
        """Deletes a folder under a name of its own, so that a half-deleted one never passes for complete.

        A failure is a warning: an old checkpoint too many is no reason to end a run.
        """
        step = folder.name.rpartition("_")[2]
        trash = self.path / f"trash_step_{step}"
        try:
            if folder != trash:
                shutil.rmtree(trash, ignore_errors=True)
                folder.rename(trash)
            shutil.rmtree(trash)
        except OSError as error:
            logger.warning("the old checkpoint %s can't be deleted: %s", folder, error)

    def remove_leftovers(self, before: int) -> None:
        """Deletes what cut saves and deletions left; a `tmp_step_` from step `before` on may be in the making."""
        for folder in list(self.path.iterdir()):
            match = re.fullmatch(r"(tmp|old|trash)_step_(\d+)", folder.name)
            if match is None:
                continue
            kind, step = match[1], int(match[2])
            is_replaced = kind == "old" and (self.path / f"step_{step}").exists()
            if kind == "trash" or is_replaced or (kind == "tmp" and step < before):
                self.delete(folder)
