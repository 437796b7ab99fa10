"""A training run under a fault injector, and an independent judge of what came out of it (`nbehind chaos`)."""
