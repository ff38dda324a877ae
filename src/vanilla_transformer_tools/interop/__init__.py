"""Weights in and out; a model is kept only if it computes what its source does."""
