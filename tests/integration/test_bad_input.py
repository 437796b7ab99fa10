"""What a user gets wrong: an exit code, and one line that says what and where."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbehind.cli import main
from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from tests import runs

SERVICES = ("run", "trainer", "producer")
SECRET = "s3cret-of-the-server"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("bad-input"), 64, password=SECRET) as server:
        yield server


def quick(capsys: pytest.CaptureFixture[str], folder: Path, what: str, *arguments: str) -> tuple[int, str]:
    """A command that fails before anything heavy is imported: exit code and standard error."""
    config = folder / "empty.toml"
    config.write_text(f'[run]\ndir = "{folder}/runs"\n')
    code = main([what, str(config), *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("what", SERVICES)
def test_an_evicting_redis(
    tmp_path: Path,
    server: EmbeddedRedis,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setenv("NBEHIND_REDIS_PASSWORD", SECRET)
    admin = connect(server.url)
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        code, err = quick(capsys, tmp_path, what, "--redis", f"redis://127.0.0.1:{server.port}")
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.close()
    assert code == 2 and err.count("\n") == 1
    assert f"nbehind {what}: error: Redis at 127.0.0.1:{server.port} evicts keys" in err
    assert "CONFIG SET maxmemory-policy noeviction" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("what", SERVICES)
def test_a_wrong_password(
    tmp_path: Path,
    server: EmbeddedRedis,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setenv("NBEHIND_REDIS_PASSWORD", "wr0ng")
    code, err = quick(capsys, tmp_path, what, "--redis", f"redis://127.0.0.1:{server.port}")
    assert code == 2 and err.count("\n") == 1
    assert "refuses the user or password: set redis.username and the variable named by redis.password_env" in err
    assert "wr0ng" not in err and SECRET not in err


@pytest.mark.parametrize("what", SERVICES)
def test_no_redis(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    code, err = quick(capsys, tmp_path, what, "--redis", "redis://127.0.0.1:1")
    assert code == 2 and err.count("\n") == 1
    assert "Redis at 127.0.0.1:1 cannot be used" in err and "is it running" in err


@pytest.mark.parametrize("what", ["trainer", "producer"])
def test_a_port_of_the_metrics_that_is_in_use(
    tmp_path: Path, redis_client: object, valkey: EmbeddedRedis, what: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cmd = runs.command(what, tmp_path, "--redis", valkey.url, **{f"metrics__{what}_port": port})
        done = runs.finish(cmd, tmp_path, 1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"nbehind {what}: error: metrics cannot be served on 127.0.0.1:{port}: Address already in use"
    )
    assert f"metrics.{what}_port" in last and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("what", "values", "words"),
    [
        ("trainer", {"data__source": "empty.jsonl"}, "empty.jsonl"),
        ("producer", {"reward__name": "exakt"}, "did you mean exact?"),
    ],
)
def test_data_and_rewards_that_are_not_there(
    tmp_path: Path, valkey: EmbeddedRedis, what: str, values: dict[str, str], words: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    done = runs.finish(runs.command(what, tmp_path, "--redis", valkey.url, **values), tmp_path, 2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"nbehind {what}: error: ") and words in last
    assert "Traceback" not in done.stderr
    assert not runs.processes_of(tmp_path)


def test_an_unknown_model(tmp_path: Path) -> None:
    values = {"model__path": "no-such-model", "trainer__engine": "torch", "producer__backend": "transformers"}
    done = runs.finish(runs.command("run", tmp_path, **values), tmp_path, 2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nbehind run: error: ") and "no-such-model" in last
    assert "Traceback" not in done.stderr


def test_a_checkpoint_folder_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "run"
    place.mkdir(parents=True)
    (place / "config.toml").write_text("")
    (place / "checkpoints").write_text("a file is in the way")
    done = runs.finish(runs.command("run", tmp_path, producer__count=1, run__max_steps=8), tmp_path, 1)
    last = done.stderr.splitlines()[-1]
    assert "cannot write checkpoint" in last and "run.dir" in last
    assert not runs.processes_of(tmp_path)
