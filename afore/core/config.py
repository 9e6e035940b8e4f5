"""What a run is made of: frozen dataclasses, which are also the command line, the config file and what roles are sent.

Checks of single values stand here; checks that need the model stand where the model is read. No slots: jsonargparse reads
defaults through ``vars``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from afore.core.errors import ConfigError
from afore.core.limits import MOST
from afore.core.limits import at_least as _at_least
from afore.core.link_options import IdleOptions, TcpOptions
from afore.core.policy_options import PolicyOptions
from afore.core.speeds import check_speeds
from afore.core.topology import Topology, is_loopback

LONGEST_S = 30 * 86_400.0
"""Longest deadline: thirty days, beyond which clocks and timers overflow sooner or later."""


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Knobs of Algorithm 1 (paper §5.2)."""

    tile_tokens: int = 8
    """M_tile: rows of a grouped-GEMM tile; 8 on CPUs, 64 on GPUs."""
    copy_budget: int | None = None
    """B: most copies a plan may make; none means max(8, N)."""
    compactness: int = 0
    """θ: a move must shift more than this many tiles."""
    compactness_share: float = 0.0
    """θ that grows with the batch: at least this part (0 to 1, in whole 1/1024) of the mean tiles of a worker."""
    worker_speed: tuple[float, ...] = ()
    """Relative speed of each FFN worker, where they differ: one of 0.5 gets half the tiles of one of 1.0. Empty: all are equal."""
    charge_us: float = 0.0
    """Virtual time: what each plan takes, from a profile, so that a run does not depend on the machine."""

    def __post_init__(self) -> None:
        _at_least("planner", 1, tile_tokens=self.tile_tokens)
        _at_least("planner", 0, copy_budget=self.copy_budget, compactness=self.compactness)
        _at_least("planner", 0, 1, compactness_share=self.compactness_share)
        _at_least("planner", 0, LONGEST_S * 1e6, charge_us=self.charge_us)
        if self.worker_speed:
            check_speeds("planner.worker_speed", self.worker_speed, None)


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What the planner believes before it has measured: seeds of the cost model."""

    tile_us: float = 20.0
    """β_tile: microseconds of FFN compute a tile costs, on a worker of the greatest planner.worker_speed."""
    copy_us: float = 20.0
    """Microseconds to copy one expert through one port."""
    window_us: float = 1000.0
    """W: microseconds between a copy's submission and its target's first use."""
    adapt: bool = True
    """Follow what the workers measure; false keeps the seeds, so that a run can be repeated exactly."""

    def __post_init__(self) -> None:
        _at_least("costs", 0, LONGEST_S * 1e6, tile_us=self.tile_us, copy_us=self.copy_us, window_us=self.window_us)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many requests run at once, and how much cache they have."""

    max_num_seqs: int = 32
    """Requests that decode at the same time, over all attention workers and microbatches."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; none means what the model allows."""
    kv_blocks: int | None = None
    """KV blocks of each attention worker; none means room for its share of max_num_seqs at 1,024 tokens each."""
    block_tokens: int = 16
    """Tokens of a KV block."""
    max_waiting: int = 4096
    """Requests that may wait; more are refused."""
    prefill_chunk_tokens: int = 512
    """Tokens of a prompt that a prefill worker runs before it looks at others; 0 runs each prompt as a whole."""
    least_microbatches: int = 0
    """Above 0: topology.microbatches is the most that run, and the engine finds by trial which number down to this one serves
    fastest; buffers then have room for max_num_seqs in that few. 0: topology.microbatches always run."""
    spread: bool = True
    """Three microbatches and more are held back, once, until their steps begin evenly apart; false: they run as they come."""

    def __post_init__(self) -> None:
        _at_least(
            "batch", 0, prefill_chunk_tokens=self.prefill_chunk_tokens, least_microbatches=self.least_microbatches
        )
        _at_least(
            "batch",
            1,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            kv_blocks=self.kv_blocks,
            block_tokens=self.block_tokens,
            max_waiting=self.max_waiting,
        )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The HTTP door. The short names ``--host``, ``--port``, ``--api-key``, ``--served-model-name`` mean these."""

    http: bool = False
    """Whether the door opens its port; the launcher opens it where it stays up."""
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines reach needs api_key, or allow_remote_without_key."""
    port: int = 8000
    """Port to listen at; 0 takes any free one."""
    api_key: str | None = None
    """What clients must send as ``Authorization: Bearer KEY``; none asks for nothing."""
    allow_remote_without_key: bool = False
    """Listen beyond this machine without a key: whoever reaches the port can use it."""
    served_model_name: str | None = None
    """What clients call the model; none takes the name of its directory."""
    max_body_bytes: int = 8 << 20
    """Longest request body."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("serve.port", f"{self.port} is no port", "give 0 (any free one) to 65535")
        _at_least("serve", 1024, max_body_bytes=self.max_body_bytes)
        for name in ("api_key", "served_model_name", "host"):
            if getattr(self, name) == "":
                raise ConfigError(f"serve.{name}", "it is empty", "leave it out, or give a value")
        if not (self.loopback or self.api_key is not None or self.allow_remote_without_key):
            raise ConfigError(
                "serve.host",
                f"{self.host} can be reached from other machines",
                "give --api-key, or --allow-remote-without-key",
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches ``host``; a name other than localhost counts as reachable from others."""
        return is_loopback(self.host)


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """Deadlines. Each await on another process has one of these."""

    join_s: float = 120.0
    """From a role's start until the whole cluster serves."""
    control_s: float = 30.0
    """For one control message to be taken."""
    step_s: float = 60.0
    """For one step of a microbatch, from its announcement to its last token report."""
    target_s: float = 10.0
    """For the inputs of a target to reach an FFN worker, after its plan; then the target is aborted."""
    verdict_s: float = 10.0
    """For all FFN workers to judge a ring entry."""
    lease_s: float = 20.0
    """How long a ring reader may stand still while entries wait for it."""
    shutdown_s: float = 4.0
    """For roles to end by themselves before they are killed."""

    def __post_init__(self) -> None:
        _at_least(
            "times",
            0.001,
            LONGEST_S,
            join_s=self.join_s,
            control_s=self.control_s,
            step_s=self.step_s,
            target_s=self.target_s,
            verdict_s=self.verdict_s,
            lease_s=self.lease_s,
            shutdown_s=self.shutdown_s,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The workers' devices."""

    name: Literal["cpu", "cuda", "emulated"] = "cpu"
    """FFN workers: cpu and cuda compute; emulated charges time from a profile (virtual time)."""
    attention: Literal["auto", "cpu", "cuda"] = "auto"
    """Attention and prefill workers: auto follows name."""
    gpus: tuple[int, ...] = ()
    """cuda: the GPUs that the workers of each role take in turn, as nvidia-smi numbers them; empty: all that are visible."""
    group: Literal["auto", "direct", "nccl"] = "auto"
    """cuda: how FFN workers get rows. direct: each reads all; nccl: each a part, which they exchange; auto: by where they are."""
    kernels: Literal["auto", "triton", "grouped", "torch"] = "auto"
    """cuda: what computes experts. auto measures those that apply and keeps what it found; torch computes the partition as well, to
    find out whether our kernels are wrong."""
    kernels_file: str | None = None
    """cuda: where what auto has measured is kept; none: ~/.cache/afore/gpu-kernels.json."""
    completion: Literal["bell", "query"] = "bell"
    """cuda: how the host learns that a target is done; ``tools.calibrate`` measures both."""
    threads: bool = True
    """cpu: compute and migration threads of their own; false runs both inline (scripts in one process)."""
    emulate_copy_us: float = 0.0
    """cpu: makes each copy take at least this long, so that a small model can show what large experts cost."""
    collectives: Literal["model-stream", "own-stream"] = "model-stream"
    """Where devices gather and reduce together: between the experts of two targets, or beside them on streams of their own."""
    verify_copies: bool = False
    """Compare each copied expert's checksum with the one taken at load."""

    def __post_init__(self) -> None:
        _at_least("device", 0, LONGEST_S * 1e6, emulate_copy_us=self.emulate_copy_us)
        if self.name == "cuda" and self.verify_copies:
            raise ConfigError("device.verify_copies", "checksums are the CPU's", "leave it out with --device cuda")
        if self.name == "cuda" and self.emulate_copy_us:
            raise ConfigError("device.emulate_copy_us", "a GPU's copies take what they take", "leave it out")


@dataclass(frozen=True, kw_only=True)
class VerbsOptions:
    """RDMA between nodes, for this process. What is none is chosen, and the choice explained (``python -m afore.tools.doctor``)."""

    api: Literal["auto", "pyverbs", "ibverbs"] = "auto"
    """The Python binding; auto takes pyverbs where it can be imported."""
    device: str | None = None
    """The RDMA device, as ``rdma link`` names it; none takes the nearest."""
    port: int | None = None
    """Its port."""
    gid_index: int | None = None
    """Index of the source address in the port's GID table; none prefers RoCE v2 over IPv4, link-local last."""
    mtu_bytes: int | None = None
    """Payload of one packet: 256, 512, 1024, 2048 or 4096."""
    ack_timeout_us: float = 1e6
    """How long a packet may stay unanswered before it is sent again."""
    retry_count: int = 7
    """How often it is; then the link is lost."""

    def __post_init__(self) -> None:
        _at_least("verbs", 1, 255, port=self.port)
        _at_least("verbs", 0, 65_535, gid_index=self.gid_index)
        _at_least("verbs", 256, 4096, mtu_bytes=self.mtu_bytes)
        _at_least("verbs", 1, 4.096 * 2**31, ack_timeout_us=self.ack_timeout_us)
        _at_least("verbs", 0, 7, retry_count=self.retry_count)


MOST_TRACE_MIB = 1 << 20
"""Of ``trace_mib``: a TiB a process."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of a cluster. Every role gets the same one."""

    model: str | None = None
    """Directory of a checkpoint; none takes the bundled model."""
    dtype: Literal["float32"] = "float32"
    """What weights and activations are computed in."""
    kernels: Literal["auto", "modules", "fused"] = "auto"
    """What attention workers compute with: fused kernels, transformers' modules, or fused where the model allows it."""
    policy: str = "afore"
    """static, afore, afore-plus, afore-ahead, the ablations afore-no-prefetch, afore-no-overlap and afore-reactive, the baselines
    eplb, eplb-redistribute, harmoeny, lina and libra, or package.module:Class."""
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    """What policies leave open."""
    topology: Topology = field(default_factory=Topology)
    """The shape of the cluster."""
    planner: PlannerOptions = field(default_factory=PlannerOptions)
    """The planner."""
    costs: CostOptions = field(default_factory=CostOptions)
    """The cost model's seeds."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    """Batching and KV cache."""
    serve: ServeOptions = field(default_factory=ServeOptions)
    """The HTTP door."""
    times: TimeOptions = field(default_factory=TimeOptions)
    """Deadlines."""
    device: DeviceOptions = field(default_factory=DeviceOptions)
    """FFN devices."""
    verbs: VerbsOptions = field(default_factory=VerbsOptions)
    """RDMA between nodes."""
    idle: IdleOptions = field(default_factory=IdleOptions)
    """How processes wait for what others write."""
    tcp: TcpOptions = field(default_factory=TcpOptions)
    """TCP between nodes; beside verbs too, where it tells who is gone."""
    trace: str | None = None
    """Directory for span files; none writes none."""
    trace_mib: int = 256
    """Most MiB of span files of one process; in a longer run the oldest spans go."""
    warm_start: str | None = None
    """Trace whose demand replicas are placed for before the first target (``tools.traces``); none starts without replicas."""
    record: str | None = None
    """File for what was demanded and planned, target by target (``tools.traces``, ``tools.replay``); none writes none."""
    record_ids: bool = False
    """Whether attention workers write the experts of each token beside ``record``."""
    record_wire: str | None = None
    """Directory for files of all that roles write and send (``tools.wire``); none writes none. Prompts are in them."""
    seed: int = 0
    """Seed of everything random that a request does not seed itself."""

    def __post_init__(self) -> None:
        if not -MOST <= self.seed <= MOST:
            raise ConfigError("seed", f"it lies beyond ±{MOST}", "give a smaller one")
        if not 1 <= self.trace_mib <= MOST_TRACE_MIB:
            raise ConfigError("trace_mib", f"{self.trace_mib} MiB", f"give 1 to {MOST_TRACE_MIB}")
        if self.record_ids and self.record is None:
            raise ConfigError(
                "record_ids", "nothing is recorded that experts of tokens could stand beside", "give record"
            )
        if self.planner.worker_speed:
            check_speeds("planner.worker_speed", self.planner.worker_speed, self.topology.ffn)
        if self.batch.least_microbatches > self.topology.microbatches:
            raise ConfigError(
                "batch.least_microbatches",
                f"{self.batch.least_microbatches} are more than the {self.topology.microbatches} of topology.microbatches",
                "raise topology.microbatches, which is the most that run",
            )

    @property
    def copy_budget(self) -> int:
        """B, resolved."""
        budget = self.planner.copy_budget
        return max(8, self.topology.ffn) if budget is None else budget

    @property
    def max_tokens_per_worker(self) -> int:
        """T_max: most tokens of one attention worker in one microbatch (the engine spreads requests evenly)."""
        fewest = self.batch.least_microbatches or self.topology.microbatches
        return -(-self.batch.max_num_seqs // (self.topology.attention * fewest))
