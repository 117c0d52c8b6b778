"""Hugging Face folders, read and written without that library: one adapter per family."""
