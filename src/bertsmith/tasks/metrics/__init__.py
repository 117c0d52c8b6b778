"""Metrics of predicted answers against correct ones, in percent."""
