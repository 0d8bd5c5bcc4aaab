"""The jitted device programs of a step."""
