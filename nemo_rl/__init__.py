"""Onehop: post-training for language models, driven by one controller that moves metadata only."""

__version__ = "0.1.0"
