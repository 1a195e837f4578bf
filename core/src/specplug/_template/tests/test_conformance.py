from specplug.testing import DrafterConformance


class TestLookback(DrafterConformance):
    algorithm = "lookback"
