"""Generation with plain transformers, for machines without vLLM: one batch at a time, one token a step.

A batch takes all waiting requests (at most producer.max_requests) and runs until its last sample ends; requests that
come meanwhile wait for the next. Prompts are padded on the left, so all samples of a batch have the same number of
completion tokens, and after new weights the KV cache is computed again from prompts and completions so far, unless
it is to stay (in_flight = "keep_cache").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbehind.config import ModelConfig, ProducerConfig
from producer_svc.adapters import Base, check_weights, engine_weights
from producer_svc.errors import GeneratorError
from producer_svc.generation import (
    TIED,
    check_request,
    check_spans,
    end_ids,
    max_new_tokens,
    read_model_config,
    weight_shapes,
)
from producer_svc.generator import Completion
from producer_svc.sampling import draw, sampled_logprobs, uniforms
from rollout_queue.messages import Finish, Request, Version
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)


class Row:
    """One sample on its way."""

    def __init__(self, key: int, request: Request, sample: int, draws: torch.Tensor, stops: frozenset[int]) -> None:
        self.key, self.request, self.sample, self.draws, self.stops = key, request, sample, draws, stops
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[Version, int, int]] = []
        self.finish: Finish | None = None

    def extend(self, token: int, logprob: float, version: Version) -> None:
        at = len(self.token_ids)
        start = self.spans.pop()[1] if self.spans and self.spans[-1][0] == version else at
        self.spans.append((version, start, at + 1))
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stops:
            self.finish = Finish.STOP
        elif len(self.token_ids) == len(self.draws):
            self.finish = Finish.LENGTH

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            np.asarray(self.token_ids, dtype=np.int32),
            np.asarray(self.logprobs, dtype=np.float32),
            check_spans(self.spans, len(self.token_ids)),
            self.finish,
        )


class TransformersBackend:
    """Implements Backend. The stop token is part of a completion: ending is an action, with a logprob of its own."""

    def __init__(self, folder: Path, model: ModelConfig, producer: ProducerConfig, base: Base | None = None) -> None:
        self.tokens = 0
        self._folder, self._config, self._producer, self._base = folder, model, producer, base
        self._waiting: dict[int, Request] = {}
        self._rows: list[Row] = []  # of the batch, in the order of the cache
        self._done: dict[int, list[Row]] = {}  # finished rows of requests that are not finished
        self._cache: Any = None  # None: to be computed from the rows
        self._logits_BV: torch.Tensor | None = None
        self._version: Version | None = None
        self._logits_version: Version | None = None  # whose weights made the logits: the next tokens are drawn from it

    # --- start and end
    def open(self) -> None:
        config = read_model_config(self._folder)
        self._shapes, self._tied = weight_shapes(self._folder), bool(config.get("tie_word_embeddings", False))
        self._vocab_size, self._ends = int(config["vocab_size"]), end_ids(self._folder)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(self._producer.threads)
        began = time.monotonic()
        from transformers import AutoModelForCausalLM

        imported = time.monotonic()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=getattr(torch, self._config.dtype))
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            raise GeneratorError(f"transformers cannot load {self._folder}: {text}") from error
        self._model: Any = model.to(self._device).eval()
        log.info("transformers is up: import %.1f s, model %.1f s", imported - began, time.monotonic() - imported)

    def close(self) -> None:
        self._rows, self._cache, self._logits_BV, self._model = [], None, None, None

    # --- requests
    def add(self, key: int, request: Request) -> None:
        check_request(request, self._config.max_context, self._vocab_size)
        self._waiting[key] = request

    def abort(self, key: int) -> None:
        self._waiting.pop(key, None)
        self._done.pop(key, None)
        self._keep([i for i, row in enumerate(self._rows) if row.key != key])

    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    @torch.inference_mode()
    def step(self) -> Iterable[tuple[int, list[Completion]]]:
        if not self._rows:
            self._next_batch()
        if self._cache is None:
            self._prefill()
        self._draw()
        ended = [row for row in self._rows if row.finish is not None]
        if ended:
            self._keep([i for i, row in enumerate(self._rows) if row.finish is None])
        if self._rows:
            self._forward_last()
        return self._finished(ended)

    def _next_batch(self) -> None:
        for key in list(self._waiting)[: self._producer.max_requests]:
            request = self._waiting.pop(key)
            stops = self._ends | frozenset(request.sampling.stop_token_ids)
            draws = uniforms(request, max_new_tokens(request, self._config.max_context))
            self._done[key] = []
            self._rows += [Row(key, request, i, draws[i], stops) for i in range(len(draws))]
        self._cache = None

    def _prefill(self) -> None:
        """The cache and the last logits of all rows, from their prompts and completions so far."""
        texts = [row.request.prompt_ids.tolist() + row.token_ids for row in self._rows]
        width = max(map(len, texts))
        ids_BT = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=self._device)
        self._pads_B1 = torch.tensor([[width - len(text)] for text in texts], device=self._device)
        self._forward(ids_BT, None)

    def _forward_last(self) -> None:
        self._forward(torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._device), self._cache)

    def _forward(self, ids_BT: torch.Tensor, cache: Any) -> None:
        past = 0 if cache is None else cache.get_seq_length()
        at_T = torch.arange(past + ids_BT.shape[1], device=self._device)
        mask_BT = at_T >= self._pads_B1
        positions_BT = (at_T[past:] - self._pads_B1).clamp_(min=0)
        output = self._model(
            ids_BT,
            attention_mask=mask_BT.long(),
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache, self._logits_BV = output.past_key_values, output.logits[:, -1]
        self._logits_version = self._version

    def _draw(self) -> None:
        """One token for every row. Rows of one request are neighbours and share how they are sampled."""
        assert self._logits_BV is not None and self._logits_version is not None
        begin = 0
        while begin < len(self._rows):
            first = self._rows[begin]
            end = begin + sum(row.key == first.key for row in self._rows[begin:])
            rows = self._rows[begin:end]
            logprobs_BV = sampled_logprobs(self._logits_BV[begin:end], first.request.sampling)
            tokens_B = draw(logprobs_BV, torch.stack([row.draws[len(row.token_ids)] for row in rows]))
            values_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
            for row, token, value in zip(rows, tokens_B.tolist(), values_B.tolist(), strict=True):
                row.extend(token, value, self._logits_version)
            begin = end
        self.tokens += len(self._rows)

    def _keep(self, indices: list[int]) -> None:
        """Drop all other rows from the batch and its cache."""
        if len(indices) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in indices]
        if not indices:
            self._cache = self._logits_BV = None
        elif self._cache is not None:
            kept = torch.tensor(indices, device=self._device)
            self._cache.batch_select_indices(kept)
            assert self._logits_BV is not None
            self._pads_B1, self._logits_BV = self._pads_B1[kept], self._logits_BV[kept]

    def _finished(self, ended: list[Row]) -> list[tuple[int, list[Completion]]]:
        out = []
        for row in ended:
            rows = self._done[row.key]
            rows.append(row)
            if len(rows) == row.request.sampling.num_generations:
                del self._done[row.key]
                out.append((row.key, [r.completion() for r in sorted(rows, key=lambda r: r.sample)]))
        return out

    # --- weights
    def check(self, staged: StagedWeights) -> None:
        check_weights(staged, self._shapes, self._tied, self._base)

    @torch.no_grad()
    def swap(self, staged: StagedWeights, keep_cache: bool) -> None:
        state = self._model.state_dict()
        for name, tensor in engine_weights(staged.path, staged.manifest, self._base):
            if not (self._tied and name == TIED):
                state[name].copy_(tensor)
        self._version = staged.version
        if not keep_cache:
            self._cache = None
