"""Rewards: what counts as right, and that nothing a model writes can hang, crash or run anything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbehind.config import RewardConfig
from producer_svc.errors import RewardError
from producer_svc.generator import Completion
from producer_svc.reward import RewardResult
from producer_svc.rewards import Scorer, load_reward
from producer_svc.rewards.answers import number_text, parse_number, same_answer
from producer_svc.rewards.no_eval import Refused, check_sympy_code, plain_eval
from producer_svc.rewards.tags import well_formed
from producer_svc.rewards.verifiers import last_boxed
from rollout_queue.messages import Finish, Request, RequestId, Sampling

ROOT = Path(__file__).resolve().parents[2]


def request(gold: Any = "5", **payload: Any) -> Request:
    payload = payload if gold is None else {"gt_answer": gold, **payload}
    return Request(RequestId(3, 1), 1, 0, 0, np.zeros(1, np.int32), Sampling(2, 5), "x", payload)


def completion(text: str) -> Completion:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), (), Finish.STOP)


@asynccontextmanager
async def scorer(name: str, timeout_s: float = 60.0, workers: int = 1, **options: Any) -> AsyncIterator[Scorer]:
    made = Scorer(
        RewardConfig(name=name, timeout_s=timeout_s, workers=workers, options=options),
        lambda ids: bytes(ids).decode(),
    )
    try:
        yield made
    finally:
        await made.close()


async def totals(made: Scorer, req: Request, *texts: str) -> list[float]:
    rewards, parts = await made.score(req, [completion(text) for text in texts])
    assert rewards.dtype == np.float32
    assert rewards.shape == (len(texts),)
    assert all(part.dtype == np.float32 and part.shape == rewards.shape for part in parts.values())
    return [round(float(r), 6) for r in rewards]


def children() -> list[int]:
    """Pids of this process's children that run a reward worker."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"producer_svc.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


# --- texts and numbers
@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("1,000", "1000", True),
        ("3.0", "3", True),
        (" +3. ", "3", True),
        (".5", "1/2", True),
        ("1e3", "1000", True),
        ("−4", "-4", True),
        ("2/4", "0.5", True),
        ("cafe\u0301", "caf\u00e9", True),
        ("0.1", "0.10000000000000001", False),  # exact, not as floats
        ("1,00", "100", False),
        ("1/0", "1/0", True),  # the same text, though no number
        ("1/0", "2/0", False),
        ("1e999999999", "3", False),
        ("nan", "NaN", False),
        ("1_000", "1000", False),
        ("9" * 300, "9" * 300, True),
        ("9" * 300 + ".0", "9" * 300, False),  # too long to be read as a number
        ("", "0", False),
    ],
)
def test_same_answer(a: str, b: str, same: bool) -> None:
    assert same_answer(a, b) is same
    assert same_answer(b, a) is same


@pytest.mark.parametrize(
    ("value", "text"), [(3.0, "3"), (1e-7, "0.0000001"), (-2.5, "-2.5"), (1e21, "1" + "0" * 21), (0.1, "0.1")]
)
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(parse_number(text) or 0) == value


async def test_exact() -> None:
    async with scorer("exact") as plain:
        assert await totals(plain, request("Yes"), " Yes\n", "yes", "Yes!", "") == [1, 0, 0, 0]
        assert await totals(plain, request(3.0), "3", "3.0", "3.00") == [1, 1, 0]
        assert await totals(plain, request(7), "7", "07") == [1, 0]
        with pytest.raises(RewardError, match="the item has no gt_answer"):
            await totals(plain, request(None), "7")
    async with scorer("exact", ignore_case=True, last_line=True, numbers=True) as lenient:
        assert await totals(lenient, request("STRASSE"), "thus:\n straße \n\n", "straße\nno") == [1, 0]
        assert await totals(lenient, request("1000"), "so\n1,000", "") == [1, 0]


async def test_think_answer() -> None:
    good = "<think>2+3</think>\n<answer>5.0</answer>"
    texts = (
        good,
        "<answer>5</answer>",
        good.replace("5.0", "6"),
        "5",
        good + "!",
        "<answer>4</answer><answer>5",
        good * 2,
    )
    async with scorer("think_answer") as made:
        rewards, parts = await made.score(request(5), [completion(text) for text in texts])
    assert parts["format"].tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert parts["correct"].tolist() == [1, 1, 0, 0, 1, 0, 1]
    np.testing.assert_allclose(rewards, [1.0, 0.8, 0.2, 0.0, 0.8, 0.0, 0.8], rtol=1e-6)
    async with scorer("think_answer", format_weight=1, correct_weight=2.5, think_prefilled=True) as made:
        assert await totals(made, request("5"), "x</think><answer>5</answer>", good) == [3.5, 2.5]


@pytest.mark.parametrize(
    "text",
    [
        "<think></think><answer> </answer>",
        "<think>a</think>b<answer>5</answer>",
        "<answer>5</answer><think>a</think>",
        "<think><answer>5</answer></think>",
        "<THINK>a</THINK><answer>5</answer>",
        "",
    ],
)
def test_what_is_not_well_formed(text: str) -> None:
    assert not well_formed(text)


# --- boxed math
@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a\}b}", r"a\}b"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{7} then \boxed{cut", "7"),
        (r"\boxed{cut", None),
        (r"boxed{5}", None),
        (r"\boxed{}", ""),
        (r"\boxed{" * 20_000, None),
    ],
)
def test_the_last_box_that_is_closed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


async def test_boxed_math() -> None:
    right_wrong: list[tuple[Any, list[str], list[str]]] = [
        (r"\frac{1}{2}", ["0.5", "1/2", r"\frac12", r"50\%"], ["2", "", "0.49"]),
        (1000, ["1,000", "10^3", "1000.0"], ["100"]),
        (r"$5\sqrt{2}$", [r"\sqrt{50}", r"5\sqrt 2"], [r"5\sqrt{3}"]),
        ("(1,2)", ["(1, 2)"], ["(2,1)"]),
        ("x=7", ["7", "x = 7"], ["8"]),
        (1e-7, ["0.0000001", "10^{-7}"], ["1"]),
        (r"\boxed{\{1,2\}}", [r"\{2,1\}"], [r"\{1\}"]),
        ("blau", ["blau", r"\text{blau}"], ["grün", "日本"]),
    ]
    async with scorer("boxed_math") as made:
        for gold, right, wrong in right_wrong:
            texts = [rf"so $\boxed{{{latex}}}$." for latex in [*right, *wrong]]
            assert await totals(made, request(gold), *texts) == [1.0] * len(right) + [0.0] * len(wrong), gold
        rewards, parts = await made.score(request(5), [completion("5"), completion(r"\boxed{5}")])
        assert (rewards.tolist(), parts["boxed"].tolist()) == ([0, 1], [0, 1])
        assert parts["timeout"].tolist() == [0, 0]
        assert len(children()) == 1
    assert children() == []


async def test_a_tower_of_powers_is_bounded_and_the_worker_comes_back() -> None:
    async with scorer("boxed_math", timeout_s=3.0) as made:
        texts = [r"\boxed{10^{10^{10}}}", r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}!}", r"\boxed{5.0}"]
        rewards, parts = await made.score(request("5"), [completion(text) for text in texts])
        assert rewards.tolist() == [0, 1, 0, 1]
        assert parts["timeout"][0] == 1
        assert parts["timeout"][[1, 3]].tolist() == [0, 0]
    assert children() == []


# --- regex
async def test_regex() -> None:
    async with scorer("regex", pattern=r"answer is (-?[\d,.]*\d)", ignore_case=True) as last:
        texts = ("the answer is 4. No, the Answer is 1,000.", "answer is 4", "nothing")
        rewards, parts = await last.score(request(1000), [completion(text) for text in texts])
        assert rewards.tolist() == [1, 0, 0]
        assert parts["matched"].tolist() == [1, 1, 0]
    async with scorer("regex", pattern=r"^\d+$", multiline=True) as only_match:
        assert await totals(only_match, request(None), "a\n12\nb", "a12") == [1, 0]
    async with scorer("regex", pattern=r"(a)(\d)?", group=2, first=True) as second:
        assert await totals(second, request("1"), "a1 a2", "a a1") == [1, 0]


async def test_a_catastrophic_pattern_is_bounded() -> None:
    async with scorer("regex", timeout_s=1.0, workers=2, pattern="(a+)+$") as made:
        rewards, parts = await made.score(request("aaa"), [completion("aaa"), completion("a" * 60 + "b")])
        assert rewards.tolist() == [1, 0]
        assert parts["timeout"].tolist() == [0, 1]
    assert children() == []


# --- reasoning-gym
async def test_reasoning_gym_takes_the_verifier_of_the_task() -> None:
    from nbehind.config import DataConfig
    from nbehind.tokenizer import ByteTokenizer
    from trainer_svc.data import load_items

    async with scorer("reasoning_gym") as made:
        for task in (
            "countdown",
            "n_queens",
            "spiral_matrix",
            "bitwise_arithmetic",
            "simple_integration",
            "zebra_puzzles",
        ):
            item = load_items(DataConfig(source=f"reasoning_gym:{task}", size=1), ByteTokenizer(), 10**6)[0]
            gold = item.payload["gt_answer"]
            texts = (gold, f"<think>hm</think><answer>{gold}</answer>", "no idea", "")
            got = await totals(made, request(None, **item.payload), *texts)
            assert got[:2] == [1, 1], task
            assert max(got[2:]) < 0.5, task
        with pytest.raises(RewardError, match="needs data\\.source"):
            await totals(made, request("5"), "5")


async def test_answers_are_not_evaluated(tmp_path: Path) -> None:
    from nbehind.config import DataConfig
    from nbehind.tokenizer import ByteTokenizer
    from trainer_svc.data import load_items

    mark = tmp_path / "ran"
    codes = [
        f"open({str(mark)!r}, 'w')",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[__import__('os').mkdir({str(mark)!r})]",
        f"sin(\"__import__('os').mkdir('{mark}')\")",
        f"Symbol.__init__.__globals__['__builtins__']['open']('{mark}', 'w')",
    ]
    async with scorer("reasoning_gym") as made:
        tasks = ("countdown", "puzzle24", "n_queens", "spiral_matrix", "string_insertion", "binary_matrix")
        for task in (*tasks, "simple_integration", "intermediate_integration", "polynomial_multiplication"):
            item = load_items(DataConfig(source=f"reasoning_gym:{task}", size=1), ByteTokenizer(), 10**6)[0]
            assert max(await totals(made, request(None, **item.payload), *codes)) < 0.5, task
    async with scorer("boxed_math") as made:
        assert max(await totals(made, request("5"), *[rf"\boxed{{{code}}}" for code in codes])) == 0
    assert not mark.exists()


def test_what_is_evaluated_and_what_is_not() -> None:
    import sympy

    assert plain_eval(" [[1, 'a'], (0x10 << 2) + -3] ") == [[1, "a"], 61]
    for code in ("abs(1)", "a", "(1).real", "[x for x in (1,)]", "lambda: 1", "f'{1}'", "().__class__"):
        with pytest.raises(Refused):
            plain_eval(code)
    names = {name: getattr(sympy, name) for name in dir(sympy)} | {"open": open}
    check_sympy_code("Integer (2 )*sin (Symbol ('x' ))**Rational (1 ,2 )+pi <=sqrt (2 )", names)
    for code in (
        "open('a')",
        "sympify('1')",
        "lambdify(1, 2)",
        "Symbol('x').name",
        "Symbol('x')()",
        "S('open')",
        "nix",
    ):
        with pytest.raises(Refused):
            check_sympy_code(code, names)


# --- the worker processes
async def test_a_killed_worker_costs_nothing_but_a_new_one() -> None:
    async with scorer("regex", pattern=r"(\d)", workers=2) as made:
        assert children() == []  # only when a job needs one
        assert await totals(made, request("5"), "5", "6") == [1, 0]
        old = children()
        assert len(old) == 2
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert await totals(made, request("5"), "5", "6", "5") == [1, 0, 1]
        assert not set(old) & set(children())
    assert children() == []


async def test_a_worker_killed_in_the_middle_of_a_job() -> None:
    async with scorer("regex", timeout_s=5.0, pattern="(a+)+$") as made:
        assert await totals(made, request("a"), "a") == [1]
        (pid,) = children()
        hard = asyncio.create_task(made.score(request("a"), [completion("a" * 60 + "b"), completion("a")]))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        rewards, parts = await hard
        assert (rewards.tolist(), parts["timeout"].tolist()) == ([0, 1], [1, 0])
    assert children() == []


async def test_close_in_the_middle_leaves_no_process_and_no_waiting_caller() -> None:
    async with scorer("regex", pattern="(a+)+$") as made:
        await totals(made, request("a"), "a")
        running = [asyncio.create_task(made.score(request("a"), [completion("a" * 60 + "b")])) for _ in range(4)]
        await asyncio.sleep(0.3)
        await made.close()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(outcome, (RewardError, asyncio.CancelledError)) for outcome in outcomes)
        with pytest.raises(RewardError, match="the scorer is closed"):
            await made.score(request("a"), [completion("a")])
    assert children() == []


async def test_a_cancelled_caller_leaves_the_pool_usable() -> None:
    async with scorer("regex", timeout_s=1.5, pattern="(a+)+$") as made:
        task = asyncio.create_task(made.score(request("a"), [completion("a" * 60 + "b")] * 3))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await totals(made, request("a"), "a") == [1]
    assert children() == []


def test_workers_die_with_their_parent_and_import_nothing_heavy(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, os, sys\n"
        "from producer_svc.rewards.pool import Worker\n"
        "async def main():\n"
        "    worker = await Worker.start({'reward': 'boxed_math', 'options': {}})\n"
        "    maps = open(f'/proc/{worker.pid}/maps').read()\n"
        "    print(worker.pid, 'libtorch' in maps, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, heavy = done.stdout.split()
    assert heavy == "False"
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z":
        assert time.monotonic() < end, "the worker outlives its parent"
        time.sleep(0.05)


# --- own functions
OWN = """
import asyncio, threading, time
from producer_svc.reward import RewardResult
THREADS = set()
def good(request, completion, *, bonus=0.0):
    THREADS.add(threading.current_thread().name)
    extra = {"long": 1.0} if len(completion.text) > 3 else {}
    return RewardResult(float(completion.text == request.payload["gt_answer"]) + bonus, extra)
async def later(request, completion):
    await asyncio.sleep(0)
    return RewardResult(float(completion.finish) + len(completion.token_ids))
def hangs(request, completion):
    time.sleep(3 if completion.text == "hang" else 0)
    return RewardResult(1.0)
async def never(request, completion):
    if completion.text == "hang":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
    return RewardResult(1.0, {"ok": 2})
def breaks(request, completion):
    raise ValueError("no such thing\\nsecond line")
def leaves(request, completion):
    raise SystemExit(3)
def bare(request, completion):
    return 1.0
def odd(request, completion):
    return RewardResult(float(completion.text))
def odd_part(request, completion):
    return RewardResult(1.0, {"p": completion.text})
class Kind:
    closed = False
    def __call__(self, request, completion):
        return RewardResult(2)
    async def close(self):
        self.closed = True
kind = Kind()
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_reward.py").write_text(OWN)
    return f"{tmp_path / 'own_reward.py'}"


async def test_own_functions_sync_async_and_objects(own: str) -> None:
    async with scorer(f"{own}:good", bonus=0.5) as made:
        rewards, parts = await made.score(request("a"), [completion("a"), completion("long")])
        assert (rewards.tolist(), parts["long"].tolist()) == ([1.5, 0.5], [0, 1])
    threads = sys.modules["nbehind_reward_own_reward"].THREADS
    assert threads == {"reward"}
    assert threading.current_thread().name not in threads  # the event loop went on
    async with scorer(f"{own}:later") as made:
        assert await totals(made, request(), "ab", "") == [2, 0]
    async with scorer(f"{own}:kind") as made:
        assert await totals(made, request(), "ab") == [2]
    assert sys.modules["nbehind_reward_own_reward"].kind.closed
    async with scorer("exact") as made:
        rewards, parts = await made.score(request(), [])
        assert (rewards.shape, parts) == ((0,), {})


async def test_a_module_in_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "reward_of_cwd.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    async with scorer("reward_of_cwd:good") as made:
        assert await totals(made, request("a"), "a") == [1]


@pytest.mark.parametrize("name", ["hangs", "never"])
async def test_own_functions_are_bounded_in_time(own: str, name: str) -> None:
    async with scorer(f"{own}:{name}", timeout_s=0.5) as made:
        rewards, parts = await made.score(request(), [completion("hang"), completion("b")])
        assert (rewards.tolist(), parts["timeout"].tolist()) == ([0, 1], [1, 0])
        await asyncio.sleep(1.2)  # the cancelled one ends in its own time


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("breaks", "", r"breaks failed on request 3\.1\.0, sample 0: ValueError: no such thing$"),
        ("leaves", "", r"RuntimeError: SystemExit\(3\)$"),
        ("bare", "", r"it returned a float: return a RewardResult"),
        ("odd", "nan", "its total is nan"),
        ("odd", "inf", "its total is inf"),
        ("odd", "1e39", "which float32 cannot hold"),
        ("odd_part", "x", "its part p is 'x', not a number"),
        ("odd_part", "-inf", "its part p is -inf"),
    ],
)
async def test_failures_of_own_functions(own: str, name: str, text: str, said: str) -> None:
    async with scorer(f"{own}:{name}") as made:
        with pytest.raises(RewardError, match=said) as error:
            await totals(made, request(), text, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("exakt", {}, "no such reward; did you mean exact"),
        ("exact", {"ignore_cases": True}, "did you mean ignore_case"),
        ("exact", {"ignore_case": 1}, "must be a bool"),
        ("think_answer", {"format_weight": True}, "must be a float"),
        ("think_answer", {"weight": "a"}, "did you mean"),
        ("boxed_math", {"precision": 3}, "there is none"),
        ("regex", {}, "pattern is missing"),
        ("regex", {"pattern": "(a"}, "is no regular expression"),
        ("regex", {"pattern": "(a)", "group": 2}, "the pattern has 1 groups"),
        ("regex", {"pattern": 3}, "must be a str"),
        ("OWN:god", {}, "has no god; did you mean good"),
        ("OWN:number", {}, "number is a int, not a function"),
        ("OWN:Kind", {}, "Kind is a type, not a function"),
        ("OWN:good", {"bonu": 1}, "unexpected keyword argument 'bonu'"),
        ("no_such_module:f", {}, "cannot be imported: ModuleNotFoundError"),
        ("/nowhere.py:f", {}, "no such file"),
        (":f", {}, "or give module:function"),
        ("json:", {}, "or give module:function"),
        ("..:f", {}, "cannot be imported"),
    ],
)
def test_rewards_that_cannot_be_loaded(own: str, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        load_reward(RewardConfig(name=name.replace("OWN", own), options=options))


def test_a_module_that_breaks_on_import(tmp_path: Path) -> None:
    for body, said in (("1/0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("raise SystemExit", "SystemExit")):
        (tmp_path / "broken.py").write_text(body)
        with pytest.raises(RewardError, match=f"cannot be imported: {said}"):
            load_reward(RewardConfig(name=f"{tmp_path / 'broken.py'}:f"))


def test_a_loaded_reward_can_be_called(own: str) -> None:
    from producer_svc.reward import ScoredText

    scored = ScoredText("5", np.zeros(1, np.int32), Finish.STOP)
    assert load_reward(RewardConfig(name="exact"))(request(), scored) == RewardResult(1.0)
    assert load_reward(RewardConfig(name=f"{own}:good"))(request(), scored) == RewardResult(1.0)
