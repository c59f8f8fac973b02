"""Losses: pure functions of tensors. No config tree, no collective, no logging."""
