"""Cookers (raw row to conversation) and task encoders (conversation to tokens), found by name or in a user's file."""
