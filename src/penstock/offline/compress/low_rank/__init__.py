"""Low rank: split layers into thinner ones."""
