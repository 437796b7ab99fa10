"""A run over TLS as an ACL user whose password has every awkward character, and no place where the password shows.

The embedded server has no TLS of its own, so a proxy of the test terminates it.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from nbehind.config_load import config_of
from nbehind.embedded import EmbeddedRedis
from nbehind.services import open_client
from rollout_queue.connection import connect
from rollout_queue.errors import ConnectionRefused
from tests import runs
from tests.proxies import Gate

OPENSSL = shutil.which("openssl") or ""
USER = "trainer@rl:1"
PASSWORD = "p@ss:w/o#r?d% \"\\é'$(x)"


def make_ca(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A CA file, and a server context with a certificate of it for 127.0.0.1."""
    if not OPENSSL:
        pytest.skip("needs the openssl command to make a certificate")
    folder.mkdir()
    ext = folder / "ext"
    ext.write_text("subjectAltName=IP:127.0.0.1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA"],
        ["req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1"],
        [
            "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", "server.pem", "-days", "2", "-extfile", "ext",
        ],
    ):  # fmt: skip
        subprocess.run([OPENSSL, *command], cwd=folder, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return folder / "ca.pem", context


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Gate, Path]]:
    """A TLS port that only USER may use, and its CA."""
    ca, context = make_ca(tmp_path / "ca")
    with EmbeddedRedis(tmp_path / "server", 64, password="admin") as server, Gate(server.port, context) as gate:
        admin = connect(server.url)
        admin.acl_setuser(
            USER, enabled=True, passwords=[f"+{PASSWORD}"], keys=["nbehind:*"],
            categories=["+@all", "-@admin", "-@dangerous"], commands=["+info"],
        )  # fmt: skip
        admin.close()
        yield gate, ca


def test_a_run_over_tls_shows_its_password_nowhere(
    tmp_path: Path, secured: tuple[Gate, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ca = secured
    monkeypatch.setenv("NBEHIND_REDIS_PASSWORD", PASSWORD)
    place = tmp_path / "place"
    place.mkdir()
    url = f"rediss://127.0.0.1:{gate.port}"
    values = {"redis__username": USER, "redis__tls_ca": str(ca), "run__max_steps": 40, "trainer__fake_step_s": 0.05}
    with runs.running(runs.command("run", place, "--redis", url, **values), place) as child:
        runs.wait_for(lambda: len(runs.rows(place)) >= 3, "the third step")
        commands = "".join(runs.processes_of(place).values())
        gate.cut()  # so that the words of a lost connection are searched too
        assert child.wait(runs.DEADLINE_S) == 0
        assert child.stdout is not None
        said = child.stdout.read()
    assert runs.summary(place)["trained"] == 160
    assert any("trying again" in log.read_text() for log in (place / "runs/run/logs").iterdir())
    shown = {"output": said.encode(), "process list": commands.encode()}
    shown |= {str(p): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert any(name.endswith("config.toml") for name in shown) and any(n.endswith("report.html") for n in shown)
    for secret in (PASSWORD, quote(PASSWORD), quote(PASSWORD, safe=""), repr(PASSWORD)[1:-1]):
        assert [name for name, content in shown.items() if secret.encode() in content] == []


def test_the_password_from_a_file_and_what_is_refused(tmp_path: Path, secured: tuple[Gate, Path]) -> None:
    gate, ca = secured
    url = f"rediss://127.0.0.1:{gate.port}"
    (tmp_path / "pw").write_text(PASSWORD + "\n", encoding="utf-8")
    (tmp_path / "wrong").write_text("wr0ng", encoding="utf-8")
    other, _ = make_ca(tmp_path / "other")

    def config(password: str, authority: Path) -> object:
        section = {"url": url, "username": USER, "tls_ca": str(authority), "password_file": str(tmp_path / password)}
        return config_of({"redis": section})

    client = open_client(config("pw", ca), url)
    assert client.ping()
    client.close()
    with pytest.raises(ConnectionRefused, match="refuses the user or password") as wrong:
        open_client(config("wrong", ca), url)
    with pytest.raises(ConnectionRefused, match=r"(?i)certificate verify failed") as untrusted:
        open_client(config("pw", other), url)
    for error in (wrong, untrusted):
        assert "wr0ng" not in str(error.value) and PASSWORD not in str(error.value)
        assert "\n" not in str(error.value)
