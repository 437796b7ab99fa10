"""What is added to vLLM's workers: taking staged weights, and dying with the producer. Runs once a tensor-parallel rank."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

from producer_svc.adapters import Base, engine_weights
from weight_sync.manifest import Manifest

PR_SET_PDEATHSIG = 1


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by collective_rpc."""

    vllm_config: Any
    model_runner: Any

    def nb_commit(self, path: str, manifest: bytes, base: Base | None) -> None:
        """Replace the weights by those in the file. To be called between two steps; the file is free afterwards."""
        from vllm.config import set_current_vllm_config

        weights = engine_weights(Path(path), Manifest.decode(manifest), base)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(weights))
            repack_tied(self.model_runner.get_model())

    def nb_die_with(self, parent: int) -> None:
        """Ask the kernel to kill this process when `parent` dies, unless it is that process."""
        if os.getpid() == parent:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def repack_tied(model: Any) -> None:
    """A tied output layer keeps a packed copy of the embedding, which a reload of the embedding leaves as it was."""
    lm_head = getattr(model, "lm_head", None)
    if lm_head is not None and getattr(model.config, "tie_word_embeddings", False):
        lm_head.quant_method.process_weights_after_loading(lm_head)
