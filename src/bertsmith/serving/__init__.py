"""A model as a service: requests collected into batches, endpoints that people's clients speak, and a page."""
