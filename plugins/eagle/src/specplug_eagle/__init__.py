"""EAGLE for specplug: a small head on the target's hidden states drafts chains and trees."""
