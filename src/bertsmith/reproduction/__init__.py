"""Experiments as data: tables of runs with claims, their statistics and verdicts."""
