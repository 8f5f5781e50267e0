"""What runs the model to learn from it."""
