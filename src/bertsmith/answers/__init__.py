"""Scores → answers: how each kind of task reads rows and turns scores into answers. Imports numpy, never PyTorch."""
