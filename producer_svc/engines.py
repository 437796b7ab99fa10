"""Which engine generates: the one place that knows all of them. Only what `backend` names is imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nbehind.config import ModelConfig, ProducerConfig, SamplingConfig
from producer_svc.adapters import Base
from producer_svc.generator import Generator
from producer_svc.threaded_generator import Backend, ThreadedGenerator


def make_generator(
    folder: Path, model: ModelConfig, producer: ProducerConfig, sampling: SamplingConfig, base: Base | None = None
) -> Generator:
    """The generator of `producer.backend` for the model in `folder`; `base` when adapters are sent. Not started."""
    if producer.backend == "fake":
        from producer_svc.fake_generator import FakeGenerator

        return FakeGenerator(producer.fake_generate_s, producer.fake_sigma, producer.in_flight)

    backend: Callable[[], Backend]
    if producer.backend == "transformers":
        from producer_svc.transformers_generator import TransformersBackend

        backend = partial(TransformersBackend, folder, model, producer, base)
    else:
        from producer_svc.vllm_generator import VllmBackend

        backend = partial(VllmBackend, folder, model, producer, sampling, base)
    return ThreadedGenerator(backend, producer.in_flight, producer.start_timeout_s)
