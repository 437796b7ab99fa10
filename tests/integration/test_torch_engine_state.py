"""What the torch engine saves, restores and names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_cases import (
    assert_same,
    configure,
    make_batch,
    start,
    weights,
)

from trainer_svc import checkpoint
from trainer_svc.errors import CheckpointError

REPO = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("same_threads_after")


def test_same_inputs_same_bits(tied):
    runs = []
    for _ in range(2):
        engine = start(tied, configure({"updates_per_step": 2}))
        stats = [dict(engine.train_step(make_batch(tied, seed=i, noise=0.1))) for i in range(3)]
        runs.append((weights(engine), stats))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_restored_engine_continues_bit_for_bit(tied, tmp_path, dtype, beta):
    config = configure({"dtype": dtype, "schedule": "cosine", "warmup_steps": 2, "lr": 1e-3}, {"beta": beta})
    batches = [make_batch(tied, seed=i, noise=0.1) for i in range(4)]
    straight = start(tied, config)
    for batch in batches[:2]:
        straight.train_step(batch)
    saved = checkpoint.save(tmp_path, 2, straight.snapshot(), {"step": 2})
    noise = torch.rand(3)
    expected = [dict(straight.train_step(b)) for b in batches[2:]]
    resumed = start(tied, config)
    resumed.train_step(batches[3])  # anything that was done before loading must not matter
    resumed.load_state(saved)
    torch.testing.assert_close(torch.rand(3), noise, rtol=0, atol=0)
    assert resumed.updates == 2
    assert [dict(resumed.train_step(b)) for b in batches[2:]] == expected
    assert_same(weights(resumed), weights(straight))


def test_state_before_the_first_update(tied, tmp_path):
    batch = make_batch(tied)
    engine = start(tied)
    engine.snapshot()(tmp_path)
    engine.train_step(batch)
    once = weights(engine)
    engine.load_state(tmp_path)
    engine.train_step(batch)
    assert_same(weights(engine), once)


def test_bf16_learns_at_small_rates(tied):
    """Without fp32 weights an update of 1e-5 on weights of 0.2 is lost in bf16 rounding (steps of 1e-3)."""
    engine = start(tied, configure({"dtype": "bfloat16", "lr": 1e-5}))
    before = weights(engine)
    assert {t.dtype for t in before.values()} == {torch.bfloat16}
    batch = make_batch(tied)
    for _ in range(60):
        engine.train_step(batch)
    changed = sum(int((a != before[n]).sum()) for n, a in engine.named_weights())
    assert changed > 0.2 * sum(t.numel() for t in before.values())


def edit_index(folder: Path, **fields) -> None:
    index = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**index, **fields}))


BROKEN = {
    "no index": lambda f: (f / "state.json").unlink(),
    "index not JSON": lambda f: (f / "state.json").write_text("{"),
    "other format": lambda f: (f / "state.json").write_text('{"format": 99}'),
    "no counter": lambda f: edit_index(f, info={}),
    "parts left out": lambda f: edit_index(f, files=[]),
    "a path that leads elsewhere": lambda f: edit_index(f, files=["../../state-00000.safetensors-"]),
    "no shard": lambda f: (f / "state-00000.safetensors").unlink(),
    "torn shard": lambda f: (f / "state-00000.safetensors").write_bytes(
        (f / "state-00000.safetensors").read_bytes()[:-9]
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_state_is_refused_and_nothing_changes(tied, tmp_path, damage):
    engine = start(tied)
    engine.snapshot()(tmp_path)
    before = weights(engine)
    BROKEN[damage](tmp_path)
    with pytest.raises(CheckpointError):
        engine.load_state(tmp_path)
    assert_same(weights(engine), before)


def test_a_state_of_another_model_is_refused(tied, untied, tmp_path):
    start(untied).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model: 'weight\.lm_head\.weight' differs"):
        start(tied).load_state(tmp_path)


def test_names_of_tied_and_untied_models(tied, untied):
    names = {folder: [n for n, _ in start(folder).named_weights()] for folder in (tied, untied)}
    assert "lm_head.weight" not in names[tied]
    assert [*names[tied], "lm_head.weight"] == names[untied]
    assert names[tied][0] == "model.embed_tokens.weight"
    assert len(set(names[untied])) == len(names[untied])


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_saved_model_loads_with_the_trained_weights(request, tmp_path, model):
    folder = request.getfixturevalue(model)
    engine = start(folder, configure({"lr": 1e-2}))
    engine.train_step(make_batch(folder))
    engine.save_model(tmp_path / "model")
    again = start(tmp_path / "model")
    assert_same(weights(again), weights(engine))
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        p.name for p in (tmp_path / "model").iterdir()
    }
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_full_disk_during_a_checkpoint(tied, tmp_path):
    """safetensors' own error becomes one line with cause and remedy, and the earlier checkpoint stays."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(REPO / "tests")!r})
from pathlib import Path
from torch_cases import start
from trainer_svc import checkpoint
from trainer_svc.errors import CheckpointError
root, engine = Path(sys.argv[2]), start(Path(sys.argv[1]))
checkpoint.save(root, 1, lambda f: None, {{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for write in (engine.snapshot(), engine.save_model):
    try:
        checkpoint.save(root, 2, write, {{}})
    except CheckpointError as error:
        print(error)
print(sorted(p.name for p in root.iterdir()), checkpoint.newest(root)[1])
"""
    root = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tied), str(root)], cwd=REPO, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    line = (
        f"cannot write checkpoint {root}/step-000002: File too large; free space there, or set run.dir to another disk"
    )
    assert done.stdout.splitlines() == [line, line, "['step-000001'] {'step': 1}"]
