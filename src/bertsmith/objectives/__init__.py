"""Training objectives: each maps a batch to sums of losses; the trainer does not depend on any of them."""
