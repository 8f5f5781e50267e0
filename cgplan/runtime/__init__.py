"""Capture and run: the forward context, graph wrappers, the capture session, the runner and bench."""
