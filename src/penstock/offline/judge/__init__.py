"""What a candidate is worth: accuracy, the contract, and comparison with the original."""
