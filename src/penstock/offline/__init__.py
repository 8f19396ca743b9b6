"""The offline half of Penstock: it turns a trained model into a bundle."""
