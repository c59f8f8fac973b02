"""A run that starts afresh where another one's checkpoints lie keeps them whole, and is resumed as any other."""

import shutil
from pathlib import Path

import pytest
from sft_runs import FinishedRun, Inputs, metrics_by_step, run_sft, write_config

from nemo_rl.utils.checkpoint_digests import find_damage


@pytest.mark.slow
def test_b16_start_fresh_moves_the_old_checkpoints_aside(
    straight_run: FinishedRun, inputs: Inputs, tmp_path: Path
) -> None:
    shutil.copytree(straight_run.checkpoints, tmp_path / "checkpoints")
    config = write_config(
        tmp_path,
        model=inputs.model,
        train=inputs.train,
        cluster__gpus_per_node=1,
        sft__seed=7,
        sft__max_num_steps=2,
        checkpointing__start_fresh=True,
    )
    run = run_sft(config)
    aside = run.checkpoints / "set_aside_1"
    assert str(aside) in run.cli.output
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["set_aside_1", "step_2"]
    old = {path.name for path in straight_run.checkpoints.glob("step_*")}
    assert {path.name for path in aside.iterdir()} == old
    assert all(find_damage(path) == [] for path in aside.iterdir())
    resumed = run_sft(config, "checkpointing.start_fresh=false", "sft.max_num_steps=3")
    assert "step_2, step 2" in resumed.cli.output
    assert sorted(metrics_by_step(resumed.logs)) == [1, 2, 3]
