"""The parts of the experiment adam_bench."""
