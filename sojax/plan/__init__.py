"""What is to be trained and how: pure values, no jax."""
