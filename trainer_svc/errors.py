"""Errors of the trainer.

TrainerError
├── DataError        the data set cannot be used; lists file, line and reason
├── TrainingError    a step that must not count: loss not finite, batch not consistent
├── CheckpointError  a checkpoint that cannot be written or read
└── Stalled          no step for give_up_s
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error that the trainer raises on purpose."""


class DataError(TrainerError):
    """The data set cannot be used."""


class TrainingError(TrainerError):
    """A step that must not count."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written or read."""


class Stalled(TrainerError):
    """No step for give_up_s; the message names who waits for what."""
