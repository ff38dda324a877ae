"""The model: configuration, layers, loss, search; the files that travel with saved weights."""
