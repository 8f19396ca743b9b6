"""Weight sharing: a codebook per layer (Deep Compression, Han et al. 2016, §3).

``bundle.coded`` writes such models in compressed (coded) form.
"""
