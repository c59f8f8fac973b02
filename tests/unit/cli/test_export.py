"""Which checkpoint `onehop export` takes. Not covered: the weights (tests/functional)."""

from __future__ import annotations

import pytest

from nemo_rl.cli.export import newest_step_dir
from nemo_rl.cli.main import main
from nemo_rl.utils.errors import UserError


def test_the_highest_complete_step_is_taken(tmp_path) -> None:
    for name in ("step_9", "step_10", "tmp_step_11", "old_step_12", "notes"):
        (tmp_path / name).mkdir()
    assert newest_step_dir(tmp_path) == tmp_path / "step_10"
    assert newest_step_dir(tmp_path / "step_9") == tmp_path / "step_9"


def test_nothing_to_export_is_said(tmp_path) -> None:
    with pytest.raises(UserError, match=r"checkpointing\.checkpoint_dir"):
        newest_step_dir(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        newest_step_dir(tmp_path / "nowhere")


def test_a_folder_that_only_looks_like_a_checkpoint_is_refused(tmp_path, capfd) -> None:
    (tmp_path / "step_1").mkdir()
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "step_1 is not a checkpoint" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
