"""Text to tokens: corpus readers, sentence splitting, tokenizers learned and loaded."""
