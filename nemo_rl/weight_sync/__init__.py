"""Handing the policy's weights to the samplers, by version."""
