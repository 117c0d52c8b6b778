"""Disentangled attention written out."""
