"""Errors of the producer.

ProducerError
├── GeneratorError   the engine failed to start, to generate or to take weights
├── RewardError      a reward that cannot be found, or that failed on a completion
└── StartTimeout     the engine did not start in time
"""

from __future__ import annotations


class ProducerError(Exception):
    """Base of every error that the producer raises on purpose."""


class GeneratorError(ProducerError):
    """The engine failed to start, to generate or to take weights."""


class RewardError(ProducerError):
    """A reward that cannot be found, or that failed on a completion."""


class StartTimeout(ProducerError):
    """The engine did not start in time."""
