"""Layers in the form that this machine computes fastest, for any model."""
