"""How far to draft, chosen while running: candidates, tiers of batch size, and the policies that choose.

Torch-free but for `tuning`, which runs the engine.
"""
