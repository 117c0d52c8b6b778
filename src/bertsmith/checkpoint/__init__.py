"""Read and write models: our own folders, and Hugging Face's by reversible tables of names."""
