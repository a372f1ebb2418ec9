"""Targets: found, loaded, and run on volley's pages of K/V and states."""
