"""Make it smaller: importance, rewiring, elastic training, pruning, augmentation, and the search for a budget."""
