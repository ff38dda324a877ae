"""The attention of a model: maps, pages, word alignments."""
