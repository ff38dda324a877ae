"""A translation service over HTTP."""
