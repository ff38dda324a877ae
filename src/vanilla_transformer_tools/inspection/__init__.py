"""What a model attends to: maps, figures, pages, word alignments."""
