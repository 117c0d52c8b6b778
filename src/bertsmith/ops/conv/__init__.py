"""Convolutions inside each sequence: no tap reaches another sequence or a pad."""

from bertsmith.ops.conv.shift import shifted

__all__ = ["shifted"]
