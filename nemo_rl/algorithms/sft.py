"""Supervised fine-tuning: its settings, and the batch it trains on."""

from nemo_rl.algorithms.sft_config import SFTConfig
from nemo_rl.data.sft_batch import prepare_sft_batch

__all__ = ["SFTConfig", "prepare_sft_batch"]
