"""Making files durable, and saying plainly why they could not be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nemo_rl.utils.errors import RunError

# The text survives the ways from a worker, where errno does not: safetensors, torch and Ray wrap the OSError.
_FULL_DISK_TEXTS = ("No space left on device", "Disk quota exceeded")
_FULL_DISK_BYTES = 16 * 2**20


def sync_tree(path: Path, *, recursive: bool = True) -> None:
    """Returns when the folder's entries, and with `recursive` all files below it, are on the disk."""
    if recursive:
        for folder, _, files in os.walk(path, topdown=False):
            for name in files:
                _sync(Path(folder) / name)
            _sync(Path(folder))
    else:
        _sync(path)


def describe_save_failure(error: BaseException, folder: Path, still_loads: Path | None) -> RunError:
    """The error to raise in place of `error`, which ended a save under `folder`.

    It names the file system when that is full, and the checkpoint that is still good.
    """
    rest = f"{still_loads} still loads" if still_loads else "there is no earlier checkpoint"
    cause = " ".join(str(error).split()) or type(error).__name__
    if _is_full_disk(error, folder):
        usage = shutil.disk_usage(_existing(folder))
        reason = (
            f"the file system at {_mount_point(folder)} is full ({usage.free / 2**20:,.0f} MiB of "
            f"{usage.total / 2**20:,.0f} MiB free): free space there or set checkpointing.checkpoint_dir"
        )
    else:
        reason = cause
    return RunError(f"saving a checkpoint under {folder} failed: {reason}; {rest}")


def _is_full_disk(error: BaseException, folder: Path) -> bool:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(text in str(link) for link in chain for text in _FULL_DISK_TEXTS):
        return True
    # torch.save says "unexpected pos" when a write falls short, with no reason beside it.
    return shutil.disk_usage(_existing(folder)).free < _FULL_DISK_BYTES


def _existing(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def _mount_point(folder: Path) -> Path:
    path = _existing(folder).resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
