"""Medusa for specplug."""
