from specplug.testing import DrafterConformance


class TestFallback(DrafterConformance):
    """It needs specplug-ngram: looks for long matches first, then for short ones."""

    algorithm = "fallback"
    config = {
        "num_draft_tokens": 6,
        "fallback_first": "ngram",
        "fallback_first_options": {"ngram_min_match": 3},
        "fallback_then": "ngram",
        "fallback_then_options": {"num_draft_tokens": 3},
    }
