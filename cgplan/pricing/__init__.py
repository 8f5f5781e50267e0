"""What graphs cost."""
