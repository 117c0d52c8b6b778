"""The best model that keeps a budget on this machine: candidates, measurements, the choice."""
