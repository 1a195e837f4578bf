"""STANDALONE for specplug: a smaller language model drafts token by token."""
