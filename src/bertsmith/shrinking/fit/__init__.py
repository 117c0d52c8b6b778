"""Search for the best model within a budget on this machine."""
