"""Nothing that comes from the network is unpickled or evaluated."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from nbehind.config import Config
from rollout_queue.metrics import serve

ROOT = Path(__file__).parents[2]
PACKAGES = ("rollout_queue", "weight_sync", "producer_svc", "trainer_svc")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
UNPICKLING = {  # torch.distributed's own ways to send objects
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
# Evaluates a checked tree of literals and arithmetic, with no names; its own tests try to break out.
CHECKED = {"producer_svc/rewards/no_eval.py": ["eval", "compile"]}


def problems(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _call(node)
    return found


def _call(node: ast.Call) -> list[str]:
    options = {k.arg: k.value for k in node.keywords}
    if isinstance(node.func, ast.Name):
        return [node.func.id] if node.func.id in CALLS else []
    if not isinstance(node.func, ast.Attribute):
        return []
    name, owner = node.func.attr, node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    if name in UNPICKLING:
        return [name]
    if (owner, name) == ("torch", "load"):
        safe = options.get("weights_only")
        return [] if isinstance(safe, ast.Constant) and safe.value is True else ["torch.load without weights_only"]
    if (owner, name) in (("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")):
        return [f"yaml.{name}"]
    if (owner, name) in (("np", "load"), ("numpy", "load")):
        allowed = options.get("allow_pickle")
        return ["np.load with pickle"] if isinstance(allowed, ast.Constant) and allowed.value else []
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_service_unpickles_or_evaluates(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = {f.relative_to(ROOT).as_posix(): p for f in files if (p := problems(f.read_text()))}
    assert found == {name: p for name, p in CHECKED.items() if name.startswith(package)}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from dill import loads", "eval(x)", "exec(x)", "torch.load(f)", "torch.load(f, weights_only=False)",
        "yaml.load(x)", "np.load(f, allow_pickle=True)", "dist.broadcast_object_list(x)",
    ],
)  # fmt: skip
def test_the_check_sees_what_it_looks_for(source: str) -> None:
    assert problems(source)


@pytest.mark.parametrize("source", ["torch.load(f, weights_only=True)", "np.load(f)", "re.compile(x)", "model.eval()"])
def test_the_check_lets_pass_what_is_safe(source: str) -> None:
    assert problems(source) == []


def other_address() -> str:
    """An address of this machine that is not loopback's 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells which address would be used
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"  # no network: another loopback address tells 0.0.0.0 from 127.0.0.1 as well


def test_metrics_are_for_this_machine_only() -> None:
    host = Config().metrics.host
    server = serve(CollectorRegistry(), host, 0, lambda: (True, "ok"))
    try:
        socket.create_connection((host, server.port), timeout=5).close()
        with pytest.raises(OSError):
            socket.create_connection((other_address(), server.port), timeout=5).close()
    finally:
        server.close()
