"""Traffic and step times: the steps that a server runs, and how long each lasts."""
