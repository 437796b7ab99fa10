"""Rewards by name, and the scorer that a producer uses."""
