"""From pairs to a saved model and the record of its run."""
