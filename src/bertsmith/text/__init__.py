"""Text to tokens: corpus and table readers, sentence splitting, training and loading of tokenizers."""
