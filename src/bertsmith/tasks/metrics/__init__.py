"""Figures of answers against what was right, in percent."""
