"""More training rows: words replaced by what a masked language model puts in their place (TinyBERT)."""
