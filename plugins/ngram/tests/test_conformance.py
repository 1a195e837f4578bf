from specplug.testing import DrafterConformance


class TestNgram(DrafterConformance):
    algorithm = "ngram"
    config = {"num_draft_tokens": 8}
