"""Devices and their arrangement."""
