"""Plans and costs that several test files share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from cgplan.config import Config
from cgplan.errors import ModeError, PlanError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer import boxes
from cgplan.optimizer.evidence import Evidence
from cgplan.optimizer.propose import PlanInputs, plan_graphs
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import Lane, capture_order
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import Traffic

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class Proposed(NamedTuple):
    plan: Plan
    evidence: Evidence

    @classmethod
    def of(cls, plan: Plan) -> Proposed:
        return cls(plan, Evidence.model_validate(plan.evidence))


def propose(config: Config, traffic: Any, *given: Any, **options: Any) -> Proposed:
    loads = [(traffic, 1.0)] if isinstance(traffic, Traffic) else traffic
    return Proposed.of(plan_graphs(PlanInputs(config, loads, *given, **options)).explained())


def propose_boxes(*given: Any, **options: Any) -> Proposed:
    return Proposed.of(boxes.propose_boxes(*given, **options))


def config_of(
    mode: str = "FULL",
    sizes: list[int] | str | None = None,
    *,
    seqs: int = 256,
    tokens: int = 8192,
    spec: int = 0,
    lora: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    **compilation: Any,
) -> Config:
    return Config.model_validate(
        {
            "compilation": {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": sizes,
                **compilation,
            },
            "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
            "speculative": {"num_speculative_tokens": spec},
            "budget": budget or {},
            "lora": lora,
        }
    )


def lists_of(keys: Iterable[Key]) -> dict[Lane, tuple[int, ...]]:
    return plan_of().changed(keys=tuple(keys)).lanes()


def plan_of(*args: Any, **options: Any) -> Plan:
    return build_plan(config_of(*args, **options))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that a valid configuration gives."""
    lora = draw(
        st.none()
        | st.fixed_dictionaries(
            {"max_loras": st.integers(1, 9), "specialize_active_lora": st.booleans()}
        )
    )
    try:
        return plan_of(
            draw(st.sampled_from([m.name for m in CUDAGraphMode])),
            draw(
                st.none()
                | st.sampled_from(["sglang", "trtllm"])
                | st.lists(st.integers(1, 80), min_size=1)
            ),
            seqs=draw(st.integers(1, 40)),
            tokens=draw(st.integers(1, 100)),
            spec=draw(st.integers(0, 4)),
            lora=lora,
            cudagraph_specialize_lora=draw(st.booleans()),
            attention_support=draw(
                st.sampled_from(["ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"])
            ),
        )
    except (PlanError, ModeError):
        return plan_of()


def key(
    mode: CUDAGraphMode,
    tokens: int,
    *,
    uniform: bool = False,
    case: int = 0,
    q: int = 1,
    seqs: int = 256,
) -> Any:
    reqs = None if mode is PIECEWISE else tokens // q if uniform else min(tokens, seqs)
    return mode, BatchDescriptor(tokens, reqs, uniform, case > 0, case)


def plan_with(keys: list[Any], /, **fields: Any) -> Plan:
    """A plan of any keys, with sizes of their own in each lane; its configuration is the default one."""
    modes = {(mode, d.uniform) for mode, d in keys}
    mode = {
        frozenset({(FULL, True), (PIECEWISE, False)}): CUDAGraphMode.FULL_AND_PIECEWISE,
        frozenset({(FULL, True)}): CUDAGraphMode.FULL_DECODE_ONLY,
        frozenset({(PIECEWISE, False)}): PIECEWISE,
    }.get(frozenset(modes), FULL)
    defaults: dict[str, Any] = {
        "mode": mode,
        "keys": capture_order(keys),
        "capture_sizes": tuple(sorted({d.num_tokens for _, d in keys})),
        "lora_cases": tuple(sorted({d.num_active_loras for _, d in keys})) or (0,),
    }
    empty = plan_of("NONE")
    return Plan.model_validate(
        {name: getattr(empty, name) for name in Plan.model_fields} | defaults | fields
    )


@st.composite
def plans_with_lanes(draw: st.DrawFn) -> Plan:
    """A plan whose lanes have sizes of their own, as a planner may choose them."""
    q = draw(st.integers(1, 3))
    seqs = draw(st.integers(1, 12))
    kinds = draw(
        st.sampled_from(
            [
                [(FULL, False)],
                [(PIECEWISE, False)],
                [(FULL, True)],
                [(FULL, True), (PIECEWISE, False)],
            ]
        )
    )
    max_loras = draw(st.none() | st.integers(1, 4))
    cases = (
        [0]
        if max_loras is None
        else draw(st.lists(st.integers(0, max_loras + 1), min_size=1, unique=True))
    )
    keys = [
        key(mode, size * q if uniform else size, uniform=uniform, case=case, q=q, seqs=seqs)
        for mode, uniform in kinds
        for case in cases
        for size in draw(st.lists(st.integers(1, seqs if uniform else 40), unique=True, max_size=5))
    ]
    mode = {
        (False, True): PIECEWISE,
        (True, True): CUDAGraphMode.FULL_AND_PIECEWISE,
        (True, False): CUDAGraphMode.FULL
        if (FULL, False) in kinds
        else CUDAGraphMode.FULL_DECODE_ONLY,
    }[any(m is FULL for m, _ in kinds), any(m is PIECEWISE for m, _ in kinds)]
    return plan_with(
        keys,
        mode=mode,
        query_len=q,
        max_num_seqs=seqs,
        max_loras=max_loras,
        lora_cases=tuple(sorted(cases)),
    )


class Costs(GraphCosts):
    """Costs on a line: ``each`` bytes and ``seconds`` of a key, which grow with the size by ``slope``."""

    source, estimated = "a line", True

    def __init__(
        self,
        pool: int,
        static: int,
        workspace: int,
        each: int,
        seconds: float,
        slope: float,
        once: float,
    ):
        self.pool, self.static, self.workspace_bytes = pool, static, workspace
        self.each, self.second, self.slope, self.once_seconds = each, seconds, slope, once

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        return (self.pool if mode is FULL else self.pool + 2) * num_tokens

    def static_bytes(self, num_tokens: int, _: tuple[int, ...] = ()) -> int:
        return self.static * num_tokens

    def driver_bytes(self, key: Key) -> int:
        return int((self.each if key[0] is FULL else 3 * self.each) * self._growth(key))

    def seconds(self, key: Key) -> float:
        return (self.second if key[0] is FULL else 2 * self.second) * self._growth(key)

    def _growth(self, key: Key) -> float:
        return 1 + self.slope * key[1].num_tokens
