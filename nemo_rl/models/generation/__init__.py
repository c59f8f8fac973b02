"""Sampling from the policy: one interface, an embedded engine and vLLM behind it."""
