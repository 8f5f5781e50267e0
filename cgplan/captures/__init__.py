"""The graphs of one model."""
