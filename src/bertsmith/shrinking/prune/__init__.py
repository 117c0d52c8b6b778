"""Pruning: a fine-tuned model without the heads and neurons it needs least, uneven from layer to layer."""
