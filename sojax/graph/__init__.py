"""The step graph and what is read from it: pure values, no jax."""
