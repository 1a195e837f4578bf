"""Manifest: two algorithms, and every hook."""

from collections.abc import Mapping, Sequence
from typing import Any

from specplug import (
    AlgorithmSpec,
    Capabilities,
    Claim,
    Defaults,
    DraftPlan,
    Facts,
    KVLayers,
    Observer,
    Problem,
    Refusal,
    RunInfo,
    StepStats,
    TapRequest,
    hookimpl,
)
from specplug_frozen.config import DeviceConfig, HostConfig

WIDTH = 16
"""Numbers in a key and in a value of frozen-device."""

HOST = Capabilities(shapes=frozenset({"tree"}), runs_on=frozenset({"host"}), variable_depth=True)
DEVICE = Capabilities(
    proposal_probs="dense",
    taps=(TapRequest(at="final_norm"),),
    draft_kv=frozenset({"own_layers"}),
    borrows=frozenset({"embed_tokens", "lm_head"}),
    variable_depth=True,
    graph_safe=True,
)


def plan_host(config: HostConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan two chains below the root."""
    if facts.draft is not None:
        return Refusal(reason="frozen-host reads no draft", try_instead="leaving it out")
    nodes = (config.num_draft_tokens or 7) - 1
    longest = nodes if depth is None else max(0, min(nodes, depth))
    return DraftPlan(needs=HOST, nodes=nodes if longest else 0, depth=longest)


def plan_device(config: DeviceConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a chain with one KV layer."""
    hidden = facts.target.config.get("hidden_size")
    if facts.draft is None or not isinstance(hidden, int):
        return Refusal(reason="frozen-device needs a draft and the target's hidden_size")
    steps = config.num_steps
    if config.num_draft_tokens is not None:
        steps = min(steps, config.num_draft_tokens - 1)
    steps = steps if depth is None else max(0, min(steps, depth))
    needs = DEVICE if config.draft_sampling else DEVICE.model_copy(update={"proposal_probs": "one_hot"})
    layers = KVLayers(layers=1, kv_heads=1, k_dim=WIDTH, v_dim=WIDTH, scratch_rows=steps)
    return DraftPlan(needs=needs, nodes=steps, depth=steps, kv=(layers,), bytes_fixed=4, bytes_per_slot=4 * hidden)


SPECS = (
    AlgorithmSpec(
        name="frozen-host",
        api=(1, 0),
        summary="what followed the last tokens before, and the time before that",
        aliases=("icy",),
        instead={"frosty": "frozen-host"},
        foreign_options={"ice": "write --speculative-frozen-match"},
        capabilities=HOST,
        config_model=HostConfig,
        plan=plan_host,
        drafter="specplug_frozen.host:HostDrafter",
        requires=("pydantic>=2",),
    ),
    AlgorithmSpec(
        name="frozen-device",
        api=(1, 0),
        summary="one layer of attention on the target's last state",
        capabilities=DEVICE,
        config_model=DeviceConfig,
        plan=plan_device,
        drafter="specplug_frozen.device:DeviceDrafter",
    ),
)


class Counter:
    """An observer."""

    def __init__(self) -> None:
        self.steps = self.emitted = self.closed = 0
        self.finished: list[str] = []

    def on_step(self, stats: StepStats) -> None:
        """Count."""
        self.steps += 1
        self.emitted += stats.emitted

    def on_finish(self, request_id: str, ledger: Mapping[str, Any]) -> None:
        """Remember."""
        assert ledger["output_tokens"] >= 0
        self.finished.append(request_id)

    def close(self) -> None:
        """Count."""
        self.closed += 1


COUNTERS: list[Counter] = []
"""Observers that were made, for the tests."""


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer both."""
    return SPECS


@hookimpl
def specplug_resolve_name(name: str, facts: Facts) -> Claim | Refusal | None:
    """Without a draft, frozen-device means frozen-host."""
    if name == "frozen-device" and facts.draft is None and facts.target.config:
        return Claim(to="frozen-host", because="there is no draft")
    return None


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any]) -> Defaults | None:
    """Take a subset of the parameters, as implementations may."""
    if algorithm == "frozen-host" and "frozen_match" not in given:
        return Defaults(values={"frozen_match": 2}, because="two are surer than one")
    return None


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Object to a match of 8."""
    if algorithm == "frozen-host" and config.frozen_match == 8:
        return (Problem(severity="error", field="frozen_match", message="8 is too cold", try_instead="7"),)
    return ()


@hookimpl
def specplug_observer(run: RunInfo) -> Observer | None:
    """Watch own runs."""
    if run.distribution != "specplug-frozen":
        return None
    COUNTERS.append(Counter())
    return COUNTERS[-1]
