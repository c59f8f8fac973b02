"""What the files of a checkpoint were when it was complete, so that a load can tell whether they still are.

`digests.json` maps every other file of the folder to its sha256, and ends with the sha256 of that list. The digests are
of what the file system gives back right after the write: they find what changes later, not what was written wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

DIGESTS = "digests.json"
_MAX_THREADS = 8

_Result = TypeVar("_Result")


def write_digests(folder: Path) -> None:
    """Writes `digests.json` for all files below `folder`, in place of an earlier one. Raises `OSError`."""
    names = _files(folder)
    digests = _map_files(lambda name: _sha256(folder / name), folder, names)
    (folder / DIGESTS).write_bytes(_rendered(digests))


def find_damage(folder: Path) -> list[str] | None:
    """What is not as it was when the digests were written: one text for each file, which begins with its path.

    Empty when all is well; None when the folder has no `digests.json`. Files that are missing, that can't be read and
    that are not listed count too. When `digests.json` itself is damaged, nothing else is compared.
    """
    try:
        content = (folder / DIGESTS).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return [f"{DIGESTS} can't be read ({error.strerror})"]
    listed = _parsed(content)
    if listed is None:
        return [f"{DIGESTS} is not as it was written"]

    def compare(name: str) -> str | None:
        try:
            return None if _sha256(folder / name) == listed[name] else f"{name} differs from its digest"
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"

    there = _files(folder)
    compared = _map_files(compare, folder, there & listed.keys())
    found = {name: problem for name, problem in compared.items() if problem is not None}
    found |= {name: f"{name} is missing" for name in listed.keys() - there}
    found |= {name: f"{name} is not part of it" for name in there - listed.keys()}
    return [found[name] for name in sorted(found)]


def _files(folder: Path) -> set[str]:
    """The files below `folder` but `digests.json`, as relative POSIX paths; links count as what they lead to."""
    found = set()
    for parent, _, names in os.walk(folder, followlinks=True):
        found |= {(Path(parent) / name).relative_to(folder).as_posix() for name in names}
    return found - {DIGESTS}


def _map_files(function: Callable[[str], _Result], folder: Path, names: Iterable[str]) -> dict[str, _Result]:
    """`function` of each file, in threads: hashing releases the interpreter lock. The large ones start first."""
    by_size = sorted(names, key=lambda name: (folder / name).lstat().st_size, reverse=True)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
        return dict(zip(by_size, pool.map(function, by_size), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rendered(digests: Mapping[str, str]) -> bytes:
    """The one way to write these digests, so that any other bytes are a damage."""
    files = dict(sorted(digests.items()))
    own = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return (json.dumps({"files": files, "sha256_of_files": own}, indent=1) + "\n").encode()


def _parsed(content: bytes) -> dict[str, str] | None:
    """The digests that `_rendered` wrote as `content`; None for any other content."""
    try:
        files = json.loads(content)["files"]
        return files if _rendered(files) == content else None
    except (ValueError, TypeError, KeyError, AttributeError):  # all the ways in which JSON can be of another form
        return None
