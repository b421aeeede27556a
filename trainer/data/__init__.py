"""From text to batches: documents, tokenizer, store, order, packed rows, global arrays."""
