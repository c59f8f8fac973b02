"""Digests of small folders: what is found, and how it is said. Not covered: files that grow while they are read."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl.utils.checkpoint import CheckpointingConfig, CheckpointManager
from nemo_rl.utils.checkpoint_digests import DIGESTS, find_damage, write_digests
from nemo_rl.utils.errors import RunError, UserError

FILES = {"training_info.json": b"{}", "policy/weights/a.safetensors": bytes(1000), "policy/weights/empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_digests(tmp_path)
    return tmp_path


def test_the_list_is_that_of_a_slow_reference(folder: Path) -> None:
    listed = json.loads((folder / DIGESTS).read_text())["files"]
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert find_damage(folder) == []
    (folder / "policy" / "weights" / "empty").write_bytes(b"no more")
    write_digests(folder)
    assert find_damage(folder) == []


def test_any_flipped_byte_of_the_list_itself_is_found(folder: Path) -> None:
    path = folder / DIGESTS
    content = path.read_bytes()
    for place in range(len(content)):
        # 1 makes another digit, 0x2a a line end of a blank.
        for flip in (0x01, 0x2A):
            path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
            assert find_damage(folder) == [f"{DIGESTS} is not as it was written"], (place, flip)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"files": []}', b'{"files": {}}', b"\xff"])
def test_a_list_of_another_form_is_damaged(folder: Path, content: bytes) -> None:
    (folder / DIGESTS).write_bytes(content)
    assert find_damage(folder) == [f"{DIGESTS} is not as it was written"]


WEIGHTS = "policy/weights/a.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda folder: (folder / WEIGHTS).write_bytes(bytes(999) + b"x"), f"{WEIGHTS} differs"),
    "cut": (lambda folder: os.truncate(folder / WEIGHTS, 999), f"{WEIGHTS} differs"),
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "added": (lambda folder: (folder / "policy" / "new").touch(), "policy/new is not part of it"),
    "a link to nothing": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).symlink_to("nowhere")),
        f"{WEIGHTS} can't be read (No such file or directory)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    make, expected = DAMAGES[damage]
    make(folder)
    (problem,) = find_damage(folder) or []
    assert problem.startswith(expected)


def test_files_behind_links_are_part_of_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Weights that were moved to a larger disk, with a link in their place."""
    elsewhere = tmp_path_factory.mktemp("disk") / "policy"
    (folder / "policy").rename(elsewhere)
    (folder / "policy").symlink_to(elsewhere)
    assert find_damage(folder) == []


def manager_with(folder: Path, steps: int) -> CheckpointManager:
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), save_period=1))
    for step in range(1, steps + 1):
        path = manager.init_tmp_checkpoint(step, {"total_steps": step})
        (path / "policy" / "weights").mkdir(parents=True)
        (path / "policy" / "weights" / "model").write_text(f"of step {step}")
        manager.finalize_checkpoint(path)
    return manager


def test_b17_a_damaged_checkpoint_is_named_with_the_one_to_take_instead(tmp_path: Path) -> None:
    """Steps 3 and 2 are damaged, so that it is step 1 whose way is shown, and the way leads there."""
    manager = manager_with(tmp_path, 3)
    for step in (1, 2, 3):
        manager.verify(tmp_path / f"step_{step}")
    (tmp_path / "step_3" / "policy" / "weights" / "model").write_text("of step 4")
    (tmp_path / "step_3" / "config.yaml").touch()
    (tmp_path / "step_2" / "training_info.json").unlink()
    newest = manager.get_latest_checkpoint_path()
    assert newest == tmp_path / "step_3"
    with pytest.raises(UserError) as caught:
        manager.verify(newest)
    assert str(caught.value) == (
        f"{newest} is damaged: config.yaml is not part of it; policy/weights/model differs from its digest. "
        f"Rename it to step_3.damaged, and the run resumes from {tmp_path / 'step_1'}, the newest that is intact"
    )
    for step in (3, 2):
        (tmp_path / f"step_{step}").rename(tmp_path / f"step_{step}.damaged")
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_1"
    (tmp_path / "step_1" / "training_info.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_1 is damaged: training_info\.json .*start_fresh=true"):
        manager.verify(tmp_path / "step_1")


def test_a_checkpoint_without_digests_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_with(tmp_path, 1)
    (tmp_path / "step_1" / DIGESTS).unlink()
    with caplog.at_level(logging.WARNING):
        manager.verify(tmp_path / "step_1")
    assert "step_1 has no digests.json" in caplog.text


def test_checkpoints_set_aside_are_whole_and_out_of_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_with(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        aside = manager.set_aside()
    assert aside == tmp_path / "set_aside_1" and str(aside) in caplog.text
    assert manager.get_latest_checkpoint_path() is None
    assert manager.set_aside() is None
    manager_with(tmp_path, 1)
    assert manager.set_aside() == tmp_path / "set_aside_2"
    for path in (aside / "step_1", aside / "step_2", tmp_path / "set_aside_2" / "step_1"):
        assert find_damage(path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set_aside_1", "set_aside_2"]


def test_moves_that_are_cut_short_leave_the_newest_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_with(tmp_path, 3)
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if path.name == "step_2":
            raise OSError("Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(RunError, match="can't be moved aside: Input/output error"):
        manager.set_aside()
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_3"
