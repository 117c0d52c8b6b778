"""Whole runs: one straight-line function per command, behind `bertsmith NAME` and `bertsmith.NAME(...)` alike."""
