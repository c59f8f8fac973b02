"""The run that most tests of this folder look at or compare with."""

import pytest
from sft_runs import FinishedRun, Inputs, make_inputs, run_sft, write_config


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def straight_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Four passes in float32 on two workers, two elastic shards, validated now and then, saved and never cut."""
    config = write_config(
        tmp_path_factory.mktemp("straight"),
        model=inputs.model,
        train=inputs.train,
        data__validation={"path": str(inputs.validation)},
        data__energon={"topology_mapper": "elastic", "logical_shards": 2},
        logger__profile_steps=[2, 10],
        sft__val_at_start=True,
        sft__val_period=10,
        sft__val_at_end=True,
    )
    return run_sft(config)
