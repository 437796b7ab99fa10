"""The demo's model: a tiny Qwen2 with a byte tokenizer, made here by a short supervised warm-up to partial skill.

Two phases. First it learns the task from right answers until it knows them. Then it learns from a careless teacher,
who mostly gives the answer to another problem, until it gives the right one at temperature 1 about three times in ten.
So it knows the answers but does not prefer them enough: what reinforcement learning is there to change.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbehind.demo_task import Problem, every_problem

if TYPE_CHECKING:
    import torch

PAD, EOS, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (PAD, EOS, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what the model is; its hash names the folder in the cache."""

    format: int = 1  # raised when the code below changes what it makes
    seed: int = 1
    hidden: int = 128
    layers: int = 2
    heads: int = 4  # of 32 each
    intermediate: int = 256
    max_positions: int = 2048
    batch: int = 64
    lr: float = 2e-3
    decay_updates: int = 500  # lr falls linearly to a tenth
    known: float = 0.97  # first phase: until this share is right at temperature 1 ...
    known_updates: int = 1200  # ... which must not take more updates than this
    careless: float = 0.7  # second phase: share of answers that belong to another problem
    careless_updates: int = 120
    careless_batch: int = 128
    careless_lr: float = 1e-4  # small, so that all problems end about equally uncertain
    skill: tuple[float, float] = (0.1, 0.45)  # the share that must then be right

    def digest(self) -> str:
        return sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]


RECIPE = Recipe()


def make_tokenizer() -> Any:
    """Every byte is a token (ids 0-255, so any text can be encoded), and the special tokens follow."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    hf: Any = transformers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The untrained model."""
    import transformers

    hf: Any = transformers
    config = hf.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return hf.Qwen2ForCausalLM(config)


class Examples:
    """Problems and answers as padded ids [B, S] and labels [B, S], -100 where nothing is learnt."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows = [self._row(p) for p in problems]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((len(rows), width), self._tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
        return ids, labels

    def _row(self, problem: Problem) -> tuple[list[int], list[int]]:
        chat = [{"role": "user", "content": problem.question}]
        prompt = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encode = self._tokenizer.encode
        return encode(prompt, add_special_tokens=False), encode(problem.answer + EOS, add_special_tokens=False)


def skill(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean probability of the right answer, its end included, at temperature 1: the expected reward."""
    import torch

    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1)
        targets = labels[:, 1:]
        picked = logprobs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return float(picked.masked_fill(targets < 0, 0.0).sum(-1).exp().mean())


def build(folder: Path, recipe: Recipe = RECIPE, log: Callable[[str], None] = lambda line: None) -> None:
    """Make the model and write it with its tokenizer to `folder`. RuntimeError if the warm-up does not succeed."""
    import torch
    import transformers

    hf: Any = transformers
    hf.utils.logging.disable_progress_bar()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster than more at this size, and the same result everywhere
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            tokenizer = make_tokenizer()
            model = make_model(recipe, tokenizer)
            _warm_up(model, Examples(tokenizer), recipe, log)
    finally:
        torch.set_num_threads(threads)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _warm_up(model: Any, examples: Examples, recipe: Recipe, log: Callable[[str], None]) -> None:
    import torch

    rng = random.Random(recipe.seed)
    problems = every_problem()
    ids, labels = examples(problems)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    now = 0.0
    for done in range(recipe.known_updates):
        if done % 25 == 0 and (now := skill(model, ids, labels)) >= recipe.known:
            log(f"demo model: knows the task after {done} updates")
            break
        optimizer.param_groups[0]["lr"] = (
            recipe.lr * min((done + 1) / 50, 1.0) * max(1 - done / recipe.decay_updates, 0.1)
        )
        rows = torch.tensor(rng.choices(range(len(problems)), k=recipe.batch))
        _update(model, optimizer, ids[rows], labels[rows])
    else:
        raise RuntimeError(f"the demo model did not learn its task in {recipe.known_updates} updates (skill {now:.2f})")
    optimizer.param_groups[0]["lr"] = recipe.careless_lr
    for _ in range(recipe.careless_updates):
        batch = [_careless(p, problems, recipe.careless, rng) for p in rng.choices(problems, k=recipe.careless_batch)]
        _update(model, optimizer, *examples(batch))
    now = skill(model, ids, labels)
    if not recipe.skill[0] <= now <= recipe.skill[1]:
        raise RuntimeError(f"the demo model answers {now:.0%} right after the warm-up, wanted {recipe.skill}")
    log(f"demo model: answers {now:.0%} right at temperature 1 after {recipe.careless_updates} more updates")


def _careless(problem: Problem, problems: Sequence[Problem], share: float, rng: random.Random) -> Problem:
    return Problem(problem.question, rng.choice(problems).answer) if rng.random() < share else problem


def _update(model: Any, optimizer: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
    import torch

    hidden = model.model(ids).last_hidden_state[:, :-1]
    mask = labels[:, 1:] >= 0
    loss: Any = torch.nn.functional.cross_entropy(model.lm_head(hidden[mask]), labels[:, 1:][mask])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
