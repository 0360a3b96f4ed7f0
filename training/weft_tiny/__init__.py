"""The embedded model weft-tiny: data generator, tokenizer, training, evaluation and export."""
