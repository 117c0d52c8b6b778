"""Keep and exchange models: our folder, and Hugging Face's, by reversible tables of names."""
