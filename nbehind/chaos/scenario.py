"""What is run under faults: a small model, many short steps, a checkpoint every ten; and how long what may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbehind.config import Config
from nbehind.config_load import config_of

START_S = {"fake": 60.0, "vllm": 300.0}  # longest wait for the first step
STALL_S = {"fake": 30.0, "vllm": 120.0}  # longest time without a step that is allowed: a vLLM engine starts for 40 s
LEAVE_S = 60.0
AFTER_STEPS = 3  # after the last fault, and again after the resume that ends the run
REFERENCE_STEP_S = 2.0  # longest that a step of the undisturbed run may take on average


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    minutes: float
    seed: int
    backend: Literal["fake", "vllm"] = "fake"
    json_file: Path | None = None
    keep: Path | None = None
    n_behind: int = 0
    order: Literal["strict", "ready"] = "strict"
    only: tuple[str, ...] = ()  # kinds of faults; () = all

    @property
    def reproducible(self) -> bool:
        """Must the weights be those of an undisturbed run? Only on policy, and only if generation does not depend on timing."""
        return self.backend == "fake" and self.n_behind == 0


def chaos_config(folder: Path, options: Options, name: str) -> Config:
    """The run `name` below `folder`. It has no end of its own."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": folder / "runs", "seed": options.seed, "max_steps": 10**9},
        "sampling": {"groups_per_step": 4, "num_generations": 4},
        "producer": {"max_requests": 4, "backend": options.backend},
        "checkpoint": {"every_steps": 10, "keep": 2},
        "metrics": {"step_ledger": True, "rollouts_per_step": 1},
    }
    tables["run"] |= {"n_behind": options.n_behind, "order": options.order}
    tables["run"] |= {"stall_s": 15.0, "give_up_s": 300.0, "drain_s": 10.0}
    special = _fake() if options.backend == "fake" else _vllm()
    for section, values in special.items():
        tables[section] = tables.get(section, {}) | values
    return config_of(tables, "chaos")


def _fake() -> dict[str, dict[str, Any]]:
    """Some steps a second, each long enough for a fault to hit any part of it. The learning rate is too low to end learning."""
    return {
        "model": {"path": "fake"},
        "trainer": {"engine": "fake", "lr": 0.002, "fake_step_s": 0.05, "reconcile_s": 2.0},
        "sampling": {"max_new_tokens": 16},
        "producer": {"lease_s": 3.0, "request_timeout_s": 60.0, "fake_generate_s": 0.1, "fake_sigma": 1.0},
        "sync": {"join_timeout_s": 5.0, "transfer_timeout_s": 5.0},
    }


def _vllm() -> dict[str, dict[str, Any]]:
    """The demo's model. An engine is slower to start, to stop and to answer, so that every deadline is longer."""
    return {
        "model": {"path": "demo", "max_context": 64},
        "trainer": {"lr": 1e-4, "tokens_per_micro_batch": 4096},
        "sampling": {"max_new_tokens": 8},
        "producer": {"lease_s": 10.0, "request_timeout_s": 60.0, "kv_cache_gb": 0.1},
        "sync": {"join_timeout_s": 15.0, "transfer_timeout_s": 15.0},
    }
