"""Target models: where their files come from, what they declare, and how they compute.

Importing this package does not import torch; `store` and `family` stay free of it.
"""
