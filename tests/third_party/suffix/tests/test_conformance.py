from specplug.testing import DrafterConformance


class TestSuffix(DrafterConformance):
    algorithm = "suffix-decoding"
    config = {"num_draft_tokens": 8}
