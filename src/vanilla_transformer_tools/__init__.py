"""The tools around the model; importing this package loads no torch."""
