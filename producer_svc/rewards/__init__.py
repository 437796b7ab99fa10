"""Rewards by name, and the scorer that a producer uses.

registry    a reward by its name or `module:function`
scorer      completions -> rewards of a group; bounds every call in time
answers     comparing texts and numbers; options of the shipped rewards
tags        exact, think_answer: pure, run in the event loop
verifiers   boxed_math, regex, reasoning_gym: may take for ever on what a model wrote, run in worker processes
pool        the worker processes;  worker: what runs in one;  no_eval: keeps libraries from evaluating texts
gym_entry   entries of reasoning-gym tasks in plain types
"""

from producer_svc.rewards.registry import load_reward
from producer_svc.rewards.scorer import Scorer

__all__ = ["Scorer", "load_reward"]
