"""`specplug serve`: the engine in its own process, and HTTP in front of it."""
