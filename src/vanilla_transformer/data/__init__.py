"""Parallel text: reading, filtering, batching, streaming."""
