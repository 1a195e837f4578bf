"""`specplug bench`: columns (algorithms with their options) side by side on the same prompts, in one process.

`columns` says what is compared, `workload` on which prompts, `measure` runs one batch through one engine,
`baseline` through transformers, `compare` interleaves them, `check` compares the texts, `figures` makes
medians and ratios of the runs, `table` and `plot` show them.
"""
