"""The host side: memory, kernels and the wire buffers."""
