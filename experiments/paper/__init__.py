"""The SuperOffload paper beside simulation."""
