"""Why a GPU test does not run here."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA device(s), found {found}")
