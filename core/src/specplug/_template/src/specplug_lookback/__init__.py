"""A draft algorithm for specplug."""
