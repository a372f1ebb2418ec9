"""Target checkpoints in few bits: what they say, and their weights as plain numbers or as codes for the kernels."""
