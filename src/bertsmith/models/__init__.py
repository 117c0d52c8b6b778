"""Whole networks: their configs, the published sizes, the encoder and its heads."""
