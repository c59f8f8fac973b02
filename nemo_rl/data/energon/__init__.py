"""The loader beside each replica: Energon draws rows, cookers and a task encoder turn them into tokens.

Only modules of this package import `megatron.energon`. Configs, topology and records import without torch.
"""
