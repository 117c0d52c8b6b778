"""HTTP interface of the service: endpoints, request and response bodies, limits, key and metrics."""
