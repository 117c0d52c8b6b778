"""Convolutions written out."""
