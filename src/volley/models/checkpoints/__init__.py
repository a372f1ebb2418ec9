"""Drafter checkpoints in every format: their configs, readers and writers."""
