"""Two draft algorithms as one, for specplug."""
