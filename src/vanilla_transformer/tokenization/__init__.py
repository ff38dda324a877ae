"""Text to ids and back, and training a tokenizer."""
