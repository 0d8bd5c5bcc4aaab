"""Slow twins that are obviously right, for tests to compare with."""
