"""Quantised target checkpoints: their configs, and their weights, decoded or as codes for the kernels."""
