"""The loop: one trainer for every objective."""
