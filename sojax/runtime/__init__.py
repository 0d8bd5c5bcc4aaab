"""Executes the step graph on real hardware."""
