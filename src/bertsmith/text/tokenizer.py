"""The tokenizer under the name the workbench knows it by; it lives with the run-time, which may import nothing else."""

from bertsmith.runtime.tokenizer import ROLES, PairFrame, Tokenizer

__all__ = ["ROLES", "PairFrame", "Tokenizer"]
