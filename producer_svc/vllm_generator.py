"""Generation with vLLM: its engine core runs in this process, in the engine thread, with continuous batching.

One step of the engine is one token for every running sample. Between two steps the thread may add and abort requests
and replace the weights (threaded_generator.py), so nothing needs to be paused: after new weights all running requests
are preempted, their KV cache is computed again, and the engine stamps their next tokens with the new version.
With in_flight = "keep_cache" what has a token already goes on with its stale cache, and the rest begins anew.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nbehind.config import ModelConfig, ProducerConfig, SamplingConfig
from producer_svc.adapters import Base, check_weights
from producer_svc.errors import GeneratorError
from producer_svc.generation import (
    Refused,
    check_request,
    check_spans,
    label,
    max_new_tokens,
    read_model_config,
    sample_seed,
    weight_shapes,
)
from producer_svc.generator import Completion
from producer_svc.vllm_env import is_cpu_build, vllm_environment
from rollout_queue.messages import Finish, Request, Version
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)

EXTENSION = "producer_svc.vllm_worker.WorkerExtension"
BLOCK_TOKENS = 32  # KV block on CPU: the default of 128 would share no prefix of a short prompt
MIN_BATCH_TOKENS = 2048
MAX_SEQUENCES = 1024
MODEL_FOLDER = Version(0, 0, "model folder")  # before the first swap
FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


def engine_arguments(
    folder: Path, model: ModelConfig, producer: ProducerConfig, sampling: SamplingConfig, cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "dtype": model.dtype,
        "max_model_len": model.max_context,
        "max_num_seqs": min(MAX_SEQUENCES, producer.max_requests * sampling.num_generations),
        "max_num_batched_tokens": max(MIN_BATCH_TOKENS, model.max_context),
        "tensor_parallel_size": producer.tensor_parallel,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled: temperature, top-p, top-k applied
        "generation_config": "vllm",  # no defaults from the model folder: the request alone says how to sample
        "enable_prefix_caching": True,
        "async_scheduling": False,  # no step may be in flight when weights are replaced
        "disable_log_stats": True,  # keeps its metrics out of our registry
        "worker_extension_cls": EXTENSION,
    }
    if producer.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    if cpu:
        arguments |= {
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": int(producer.kv_cache_gb * 2**30),  # explicit: no profiling run at the start
            # The V1 runner rewinds the generator of a seeded request after a partial prefill, which CPU generators cannot.
            "enable_chunked_prefill": False,
        }
    else:
        arguments["gpu_memory_utilization"] = producer.gpu_memory_utilization
    return arguments


class Job:
    """A request, and its samples' outcomes."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outcomes: list[Completion | None] = [None] * request.sampling.num_generations


class VllmBackend:
    """Implements Backend. The stop token is part of a completion: ending is an action, with a logprob of its own."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        producer: ProducerConfig,
        sampling: SamplingConfig,
        base: Base | None = None,
    ) -> None:
        self.tokens = 0
        self._folder, self._model, self._producer, self._sampling, self._base = folder, model, producer, sampling, base
        self._running_tokens = 0
        self._engine: Any = None
        self._jobs: dict[int, Job] = {}
        self._versions: dict[str, Version] = {}
        self._swaps = 0

    # --- start and end
    def open(self) -> None:
        config = read_model_config(self._folder)
        self._shapes, self._tied = weight_shapes(self._folder), bool(config.get("tie_word_embeddings", False))
        self._vocab_size = int(config["vocab_size"])
        os.environ.update(vllm_environment(self._producer, self._model))
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.v1.engine.llm_engine import LLMEngine

            imported = time.monotonic()
            self._engine = self._build(LLMEngine)
            built = time.monotonic()
            self._warm_up()
        log.info(
            "vLLM is up: import %.1f s, engine %.1f s, warm-up %.1f s",
            imported - began,
            built - imported,
            time.monotonic() - built,
        )

    def _build(self, engine_class: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        arguments = engine_arguments(self._folder, self._model, self._producer, self._sampling, is_cpu_build())
        try:
            engine = engine_class.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise GeneratorError(self._cannot_start(error)) from error
        engine.collective_rpc("nb_die_with", args=(os.getpid(),))
        return engine

    def _cannot_start(self, error: Exception) -> str:
        """One line with the settings that vLLM most often refuses, in the names of this project."""
        memory = (
            f"producer.kv_cache_gb = {self._producer.kv_cache_gb:g}"
            if is_cpu_build()
            else f"producer.gpu_memory_utilization = {self._producer.gpu_memory_utilization:g}"
        )
        return (
            f"vLLM cannot start on {self._folder} with model.max_context = {self._model.max_context}, {memory}, "
            f"producer.tensor_parallel = {self._producer.tensor_parallel}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        )

    def _warm_up(self) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=2, logprobs=0, seed=0, detokenize=False)
        self._engine.add_request("warm-up", tokens_input([0, 0, 0]), params)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.reset_prefix_cache()
        self._name_version(MODEL_FOLDER)

    def close(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        engine.engine_core.shutdown()  # workers, process groups, two collections

    # --- requests
    def add(self, key: int, request: Request) -> None:
        check_request(request, self._model.max_context, self._vocab_size)
        job = self._jobs[key] = Job(request)
        try:
            for sample in range(len(job.outcomes)):
                self._add_sample(key, sample)
        except ValueError as error:
            self.abort(key)
            raise Refused(f"request {request.id} cannot be generated: {error}") from error

    def _add_sample(self, key: int, sample: int) -> None:
        """One engine request a sample: seeds of our own, and an outcome as soon as it is there."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        request = self._jobs[key].request
        sampling = request.sampling
        params = SamplingParams(
            max_tokens=max_new_tokens(request, self._model.max_context),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sample_seed(request.seed, sample),
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # A prefix cached before a swap has another salt, also when the same version comes a second time: with
        # keep_cache its blocks may hold the KV of two versions.
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"swap {self._swaps}")
        self._engine.add_request(f"{key}.{sample}", prompt, params)

    def abort(self, key: int) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            self._engine.abort_request([f"{key}.{i}" for i, done in enumerate(job.outcomes) if done is None])
        self._running_tokens = self._in_flight()

    def busy(self) -> bool:
        return bool(self._jobs)

    def step(self) -> Iterable[tuple[int, list[Completion]]]:
        finished, drawn = [], -self._running_tokens
        for output in self._engine.step():
            key, sample = (int(part) for part in output.request_id.split("."))
            completion = self._completion(output.outputs[0])
            drawn += len(completion.token_ids)
            outcomes = self._jobs[key].outcomes
            outcomes[sample] = completion
            whole = [c for c in outcomes if c is not None]
            if len(whole) == len(outcomes):
                del self._jobs[key]
                finished.append((key, whole))
        self._running_tokens = self._in_flight()
        self.tokens += drawn + self._running_tokens
        return finished

    def _in_flight(self) -> int:
        """Tokens of the samples that are not finished."""
        return sum(s.detokenizer.num_output_tokens() for s in self._engine.output_processor.request_states.values())

    def _completion(self, output: Any) -> Completion:
        if output.finish_reason not in FINISH:
            raise GeneratorError(f"vLLM ended a sample with {output.finish_reason!r}")
        token_ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        if logprobs.shape != token_ids.shape:
            raise GeneratorError(f"vLLM gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
        spans = [(self._versions[span.version], span.start, span.end) for span in output.weight_versions]
        return Completion(token_ids, logprobs, check_spans(spans, len(token_ids)), FINISH[output.finish_reason])

    # --- weights
    def check(self, staged: StagedWeights) -> None:
        check_weights(staged, self._shapes, self._tied, self._base)

    def swap(self, staged: StagedWeights, keep_cache: bool) -> None:
        if not self._jobs:
            self._versions.clear()
        self._swaps += 1
        begun_anew = self._forget_unbegun() if keep_cache else []
        if not keep_cache or not self._engine.has_unfinished_requests():
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.collective_rpc("nb_commit", args=(str(staged.path), staged.manifest.encode(), self._base))
        self._name_version(staged.version)
        for key, sample in begun_anew:
            self._add_sample(key, sample)

    def _name_version(self, version: Version) -> None:
        self._versions[label(version)] = version
        self._engine.set_weight_version(label(version))

    def _forget_unbegun(self) -> list[tuple[int, int]]:
        """Take the samples without a token out of the engine: under their old salt they would find stale prefixes."""
        states = self._engine.output_processor.request_states.values()
        ids = [s.external_req_id for s in states if not s.detokenizer.num_output_tokens()]
        self._engine.abort_request(ids)
        return [(int(key), int(sample)) for key, sample in (name.split(".") for name in ids)]
