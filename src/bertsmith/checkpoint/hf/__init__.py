"""Hugging Face folders, read and written without that library."""

from bertsmith.checkpoint.hf.native import Native, check_exportable
from bertsmith.checkpoint.hf.reading import load_hf
from bertsmith.checkpoint.hf.registry import TWINS, twin_of
from bertsmith.checkpoint.hf.writing import NATIVE_CHOICES, HfExport, NativeChoice, plan_hf, save_hf

__all__ = [
    "NATIVE_CHOICES",
    "TWINS",
    "HfExport",
    "Native",
    "NativeChoice",
    "check_exportable",
    "load_hf",
    "plan_hf",
    "save_hf",
    "twin_of",
]
