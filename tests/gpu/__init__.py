"""Tests of the whole engine on a GPU that is not there (``pretended.py``)."""
