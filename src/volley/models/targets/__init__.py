"""Targets: locate them, load them, and run them on volley's pages of K/V and states."""
