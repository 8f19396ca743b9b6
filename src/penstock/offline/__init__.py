"""The offline half: from a trained model to a bundle."""
