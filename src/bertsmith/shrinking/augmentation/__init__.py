"""Data augmentation: replace words of training rows by predictions of a masked language model (TinyBERT)."""
