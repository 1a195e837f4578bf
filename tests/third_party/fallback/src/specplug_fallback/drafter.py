"""Both drafters, one after the other: the core lets each fill only rows without a draft."""

from specplug import CombinedDrafter, DraftContext, DraftPlan
from specplug_fallback.config import FallbackConfig


class FallbackDrafter(CombinedDrafter):
    """Builds its parts in the order in which they were planned."""

    def __init__(self, config: FallbackConfig, plan: DraftPlan, ctx: DraftContext) -> None:
        super().__init__(config, plan, ctx)
        self.parts = [ctx.build(part.name, part.options, draft=part.draft) for part in config.parts()]
