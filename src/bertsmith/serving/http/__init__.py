"""The service as people's clients speak to it: endpoints, wire shapes, limits, key and metrics."""
