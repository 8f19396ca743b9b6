"""Low rank: replace layers by products of low-rank factors."""
