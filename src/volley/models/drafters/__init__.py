"""Drafters: their layers and heads, and what they are at work beside a target."""
