"""Drafters: their layers and heads, and the models that run them beside a target."""
