"""The attention of a model: maps, figures, pages, word alignments."""
