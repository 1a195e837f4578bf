"""Structured output: `response_format` as a grammar that says, at every position, which tokens may follow.

The grammar is llguidance's (extra `serve`); it is imported when the first request asks for it. A mask is part of p:
drafts that a grammar forbids have probability 0 and are rejected by the acceptance rule, never dropped from a
distribution that was sampled from.
"""
