"""Training: one loop for every objective."""
