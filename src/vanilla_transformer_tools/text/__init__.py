"""Text: pairs, filters, tokenizer pairs, languages, token ids, batches and streams."""
