"""Attention that scores content against relative positions beside content against content (He et al. 2021)."""
