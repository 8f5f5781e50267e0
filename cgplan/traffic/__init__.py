"""The steps that a server runs, and how long each lasts."""
