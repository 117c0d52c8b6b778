"""Tokens to batches: token shards, sequence layouts, corruption, loaders and tasks."""
