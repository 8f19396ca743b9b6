"""Layers split into thinner ones: matrix.py and convolution.py find the factors, rank_choice.py how thin, factorize.py does it."""
