"""The files that people start from agree with the code: example configs, and the page of config keys.

Not covered: whether a run with them learns (tests/functional, `make demo`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.algorithms.single_controller_utils.config import MasterConfig as RLMasterConfig
from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config
from nemo_rl.utils.config import load_config, validate_config

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
REQUIRED = ["policy.model_name=model", "data.train.path=rows.jsonl"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_configs_are_valid_and_every_key_acts(path) -> None:
    raw = load_config(path, REQUIRED)
    if not {"ppo", "grpo"} & set(raw):
        _, inert = validate_config(MasterConfig, raw)
    else:
        config, inert = validate_config(RLMasterConfig, raw)
        assert validate_single_controller_config(config) == []
    assert inert == []


def test_the_page_of_config_keys_is_up_to_date() -> None:
    """If this fails: python docs/make_config_page.py"""
    command = [sys.executable, str(ROOT / "docs" / "make_config_page.py"), "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
