"""HTTP service for models: dynamic batching, endpoints for common clients, and a web page."""
