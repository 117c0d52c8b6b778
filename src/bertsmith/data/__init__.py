"""Tokens → batches: token shards, sequence layouts, packing, corruption and the loader."""
