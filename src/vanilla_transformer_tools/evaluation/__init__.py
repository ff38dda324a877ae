"""Scores with their signatures and intervals, and significance."""
