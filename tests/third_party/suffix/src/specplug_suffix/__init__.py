"""Suffix decoding for specplug."""
