"""Engines that run trained models, and the artefacts they run."""
