"""Which batches come, and how long a step lasts."""
