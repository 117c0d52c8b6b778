"""What to learn: each objective turns a batch into sums of losses; the trainer knows none of them."""
