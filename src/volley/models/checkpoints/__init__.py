"""Drafter checkpoints in every format: their configs, reading, writing."""
