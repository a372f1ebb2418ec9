"""Layers as this machine computes them fastest, whatever model they belong to."""
