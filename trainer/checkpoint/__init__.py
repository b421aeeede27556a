"""Saving a run, and opening it again on any mesh."""
