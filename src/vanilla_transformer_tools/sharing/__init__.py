"""The model card, and upload to the Hub."""
