"""The job spec: one frozen tree with every setting of a run, its bounds and its documentation.

The line under a field says what rises or falls when the field changes; `flatpeak init` writes those
lines into the starter file. Rules that need the model are functions at the end. `spec_file` reads
and writes YAML, `spec_problems` words what is refused. Nothing here imports torch or ray.
"""

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flatpeak.controller.spec_problems import describe_problems
from flatpeak.controller.spec_values import (
    Auto,
    Beta,
    Bytes,
    BytesOrZero,
    Count,
    CountOrZero,
    FloatOrZero,
    Host,
    JsonLike,
    Multiple,
    Name,
    PathText,
    PositiveFloat,
    Processes,
    Seconds,
)
from flatpeak.workers.errors import SpecError


class Section(BaseModel):
    # Strict: `steps: "20"` or `steps: yes` is a slip, not a number.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def an_empty_section_has_its_defaults(cls, data: Any) -> Any:
        return {} if data is None else data


class ModelSpec(Section):
    path: PathText | None = None
    """Hugging Face directory with config.json and safetensors; give this or `config`."""
    config: JsonLike | None = None
    """Inline Hugging Face config with `model_type`; the weights are then random."""
    weights: Literal["auto", "random", "pretrained"] = "auto"
    """auto loads what `path` holds; random starts afresh from the config alone."""

    @model_validator(mode="after")
    def the_model_has_one_source(self) -> "ModelSpec":
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(
                f"give exactly one of `path` and `config`, not {given}; "
                "`--set model.config=null` takes one out"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs `model_type`, for example model_type: qwen3_moe")
        return self

    @model_validator(mode="after")
    def pretrained_weights_come_from_a_path(self) -> "ModelSpec":
        if self.weights == "pretrained" and self.path is None:
            raise ValueError("weights: pretrained needs `path`; an inline `config` has none")
        return self


class DataSpec(Section):
    source: PathText = "stdlib"
    """stdlib is the source code of Python's library; else a file or directory of documents."""
    tokenizer: PathText = "bytes"
    """bytes is built in, one token a byte; else a Hugging Face tokenizer directory."""
    text_column: str = "text"
    """Column (Parquet) or key (JSONL) that holds a document's text."""
    tokens_column: str | None = None
    """Column with ready token ids; skips the tokenizer when given."""
    cache_dir: PathText = "~/.cache/flatpeak"
    """Holds tokenized documents; a cache that persists makes later starts faster."""


class ScheduleSpec(Section):
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from nothing to `lr`; more is gentler."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the fall from `lr` to `lr * min_lr_ratio` after the warm-up."""
    min_lr_ratio: Annotated[FloatOrZero, Field(le=1)] = 0.1
    """Share of `lr` that is left at the end of the decay; 1 means no decay."""
    decay_steps: Count | None = None
    """Step at which the decay ends; null means `train.steps`. More keeps the rate up longer."""


class TrainSpec(Section):
    steps: Count = 100
    """Optimizer steps of the run."""
    sequences_per_step: Count = 8
    """Global batch in sequences; raises time per step, leaves per-device peaks alone."""
    sequence_length: Count = 1024
    """Tokens a sequence; boundaries and attention grow with it."""
    microbatches: Count = 1
    """Passes a step is cut into; more lowers the activations in flight, at some speed."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay of AdamW's two moments; nearer to 1 averages over more steps."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator; more damps the update of rarely used weights."""
    weight_decay: FloatOrZero = 0.1
    """Decoupled decay a step times lr; norms, biases and router biases are left out."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How the learning rate moves over the steps."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null means no clipping."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Working precision; bfloat16 halves weights and activations, masters stay float32."""
    seed: CountOrZero = 0
    """Fixes random weights and the order of samples."""
    router_bias_update_rate: FloatOrZero = 0.0
    """Step of the selection bias towards idle experts (DeepSeek-V3 style); 0 turns it off."""
    router_aux_loss_coef: FloatOrZero | None = None
    """Weight of the load-balancing loss; null takes what the model's config asks for."""
    z_loss: Annotated[FloatOrZero, Field(le=1e18)] = 0.0
    """Weight of each token's squared log-sum-exp in the loss, as reported; more keeps it near 0."""
    label_smoothing: Annotated[FloatOrZero, Field(lt=1)] = 0.0
    """Share of a target spread over the vocabulary in the loss, as reported; more is less sure."""

    @model_validator(mode="after")
    def the_warmup_ends_before_the_decay(self) -> "TrainSpec":
        end = self.schedule.decay_steps or self.steps
        if self.schedule.decay != "constant" and self.schedule.warmup_steps > end:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is past the end of the "
                f"decay at step {end}; use at most {end}, or raise schedule.decay_steps"
            )
        return self


class AutoscaleSpec(Section):
    optimizers: Annotated[tuple[Processes, Processes], Field(strict=False)] | None = None
    """[fewest, most] actors, between which the run finds its own number; null changes none."""
    exposed_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of a step spent waiting for updates above which more actors come; more waits longer."""
    window_steps: Annotated[int, Field(ge=2, le=1000)] = 8
    """Steps in a row that a change has to be good for; more reacts later, and to less noise."""
    cooldown_steps: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Steps after a change, or after one that failed, of which nothing is concluded."""
    workers: Annotated[tuple[Processes, Processes], Field(strict=False)] | None = None
    """[fewest, most] workers: more come to free nodes, fewer stay if one is lost; null: neither."""
    workers_free_s: Seconds = 300.0
    """How long there has to be room for more workers before they come; more starts anew less."""

    @model_validator(mode="after")
    def ranges_begin_below_their_end(self) -> "AutoscaleSpec":
        for name, given in (("optimizers", self.optimizers), ("workers", self.workers)):
            if given is not None and given[0] > given[1]:
                raise ValueError(
                    f"{name} = [{given[0]}, {given[1]}] is [fewest, most]; use "
                    f"[{given[1]}, {given[0]}]"
                )
        return self


class ClusterSpec(Section):
    workers: Processes = 1
    """Workers (W), one a device; more lowers each one's share of weights and tokens."""
    optimizers: Processes = 1
    """CPU actors that own the optimizer state; more shortens the update."""
    max_optimizers: Processes | None = None
    """Most that `flatpeak scale` may ask for; each one adds `slots` spare frames. null: no more."""
    optimizer_placement: Literal["beside", "anywhere"] = "beside"
    """anywhere takes nodes without workers first and spreads state over all, by the network."""
    address: str = "local"
    """local starts a Ray on this machine; else a Ray address, or auto to find one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when a device is there."""
    cpus_per_worker: Annotated[int, Field(ge=1, le=1024)] = 1
    """Cores and threads a worker gets; matters most on device cpu."""
    cpus_per_optimizer: Annotated[int, Field(ge=1, le=1024)] = 1
    """Cores and threads an optimizer actor gets; more shortens the update."""
    shm_dir: PathText = "/dev/shm"
    """Directory of the arenas: 16 bytes a parameter, boundaries. ~ and $NAME are each node's."""
    rendezvous_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at which the workers meet; 0 takes any free one."""
    start_timeout_s: Seconds = 120.0
    """Longest wait for the start, and for an answer from another node; raise it if those lag."""
    step_timeout_s: Seconds = 1800.0
    """Longest wait for one step; raise it above the slowest step you expect."""
    heartbeat_timeout_s: Seconds = 60.0
    """A process that is silent so long in a step hangs and is replaced; less finds it sooner."""
    autoscale: AutoscaleSpec = AutoscaleSpec()
    """How the run changes its processes by itself, between two steps."""

    @model_validator(mode="after")
    def there_are_arenas_for_all_optimizers(self) -> "ClusterSpec":
        most = self.max_optimizers
        if most is not None and most < self.optimizers:
            raise ValueError(
                f"max_optimizers = {most} is below optimizers = {self.optimizers}; set it to "
                f"{self.optimizers} or more, or leave it out"
            )
        if most is not None and self.optimizer_placement == "anywhere":
            raise ValueError(
                "max_optimizers is for optimizer_placement = beside: with anywhere there are as "
                "many arenas as actors, whatever their number changes to; leave it out"
            )
        return self

    @model_validator(mode="after")
    def autoscaling_stays_where_the_run_can(self) -> "ClusterSpec":
        wanted = self.autoscale.optimizers
        if wanted is None:
            return self
        if self.optimizer_placement == "anywhere":
            raise ValueError(
                "autoscale.optimizers is for optimizer_placement = beside: with anywhere a change "
                "copies the state and starts all processes anew, so it has to be asked for; leave "
                "it out"
            )
        if wanted[1] > self.arenas:
            raise ValueError(
                f"autoscale.optimizers asks for up to {wanted[1]} actors, but there are arenas for "
                f"{self.arenas}; set max_optimizers to {wanted[1]} or more"
            )
        return self

    @model_validator(mode="after")
    def a_run_starts_where_autoscaling_keeps_it(self) -> "ClusterSpec":
        ranges = {"optimizers": self.autoscale.optimizers, "workers": self.autoscale.workers}
        for name, wanted in ranges.items():
            start = getattr(self, name)
            if wanted is not None and not wanted[0] <= start <= wanted[1]:
                raise ValueError(
                    f"{name} = {start} is outside autoscale.{name} = [{wanted[0]}, {wanted[1]}]; "
                    f"start with {min(max(start, wanted[0]), wanted[1])}, or widen the range"
                )
        return self

    @property
    def arenas(self) -> int:
        """Into so many the optimizer state is cut; an actor owns one or more."""
        return self.max_optimizers or self.optimizers

    @property
    def peer_timeout_s(self) -> float:
        """Longest wait of a worker for others within a step: an optimizer actor may be replaced."""
        return self.step_timeout_s + self.start_timeout_s


class ParallelSpec(Section):
    sequence: Count | Auto = "auto"
    """Ranks that share one sequence (D); more lowers tokens a rank, adds all-to-alls."""
    expert: Count | Auto = "auto"
    """Ranks that split the experts (E_p); more lowers expert bytes a rank."""
    vocabulary: Count | Auto = "auto"
    """Ranks that split the vocabulary (P); more lowers head bytes, adds ring hops."""

    @property
    def degrees(self) -> dict[str, int | Literal["auto"]]:
        return {"sequence": self.sequence, "expert": self.expert, "vocabulary": self.vocabulary}


class DispatchSpec(Section):
    budget_bytes: Bytes | Auto = "auto"
    """Most above inputs and results. auto: device_budget_bytes / 8, no bound while that is null."""
    tokens_per_chunk: Count | Auto = "auto"
    """Most tokens whose routes travel at once; auto takes as many as the budget allows."""
    max_chunks: Count = 64
    """Most chunks that follow from `tokens_per_chunk`; budget and cap may ask for more."""
    receive_rows: Count | Auto = "auto"
    """Hard cap of rows a rank receives in a chunk; auto leaves it to the budget."""
    capacity_factor: Multiple = 1.0
    """A rank takes up to this multiple of the mean load; more migrates less, bounds worse."""
    min_chunk: Count = 1024
    """Fewest routes of an expert worth moving to a helper, at most an eighth of a rank's mean."""
    balance_above: Multiple = 1.3
    """Largest over mean load at which balancing starts; more leaves more imbalance."""
    max_foreign_experts: CountOrZero = 4
    """Foreign experts a rank may hold at once; more balances better, costs their bytes."""


class VocabularySpec(Section):
    token_tile: Count | Auto = "auto"
    """Tokens of a logit strip; fewer lowers the vocabulary peak, makes smaller products."""
    schedule: Literal["auto", "weights", "activations"] = "auto"
    """What travels the ring; auto moves weights when a rank has more tokens than rows."""


class BoundariesSpec(Section):
    offload: bool = True
    """Keep layer inputs in host memory; lowers the device peak by depth x tokens."""
    host_budget_bytes: BytesOrZero | Auto = "auto"
    """Host bytes a rank may use for boundaries; the ones beyond stay on the device."""


class OptimizerSpec(Section):
    bucket_parameters: Count = 4_194_304
    """Parameters a bucket (beta); fewer lowers staging, more amortises each transfer."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 2
    """Spare frames, and buckets on the device at once (18 B a parameter); more overlaps more."""
    update_on: Literal["host", "device", "auto"] = "host"
    """AdamW in the optimizer actors, on the workers' devices, or both; host for actors anywhere."""
    mirrors: Annotated[int, Field(ge=0, le=1)] = 0
    """1 keeps all state on a second node too; doubles it and updates, sends 4 B a parameter."""


class MemorySpec(Section):
    dispatch: DispatchSpec = DispatchSpec()
    """Bounds of the expert dispatch."""
    vocabulary: VocabularySpec = VocabularySpec()
    """Bounds of the vocabulary projection and loss."""
    boundaries: BoundariesSpec = BoundariesSpec()
    """Where the inputs of checkpointed layers are kept."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Bounds of the optimizer's staging."""
    device_budget_bytes: Bytes | None = None
    """A step whose measured peak is above it ends the run; null sets no limit."""


class SnapshotsSpec(Section):
    every_steps: CountOrZero = 0
    """Steps between snapshots; fewer loses less to a failure. 0 writes none on the way."""
    keep: Count = 2
    """Newest snapshots kept on disk; each takes 12 bytes a parameter."""
    keep_every_steps: CountOrZero = 0
    """Of steps that this divides, snapshots stay for good; 0 keeps none beside the newest."""
    at_end: bool = True
    """Write one after the last step, so that the run can go on later."""


class MetricsSpec(Section):
    peaks: bool = True
    """Attribute memory peaks to components; under 1 % of a step on CUDA, more on CPU."""
    export: bool = True
    """Serve Prometheus metrics from every process, each at a port of its own."""
    host: Host = "127.0.0.1"
    """Address to serve at; `node` takes the one by which the Ray cluster knows each node."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the controller, which lists the others' at /targets; 0 takes any free one."""
    token_file: PathText | None = None
    """File with a bearer token that scrapers must send; null asks for none."""
    window_s: PositiveFloat = 60.0
    """How long a peak stays in the window metric: a few scrape intervals."""
    grafana_url: str | None = None
    """Grafana that gets marks of snapshots and failures; its token is taken from GRAFANA_TOKEN."""


class WandbSpec(Section):
    project: Name | None = None
    """Weights & Biases project that gets every step (extra `wandb`); null writes none."""
    entity: Name | None = None
    """User or team that the project belongs to; null takes your default."""
    name: Name | None = None
    """Name of the run there; null takes `run`."""
    mode: Literal["online", "offline"] = "online"
    """online needs `wandb login` or WANDB_API_KEY; offline writes files for `wandb sync`."""

    @model_validator(mode="after")
    def what_is_named_has_a_project(self) -> "WandbSpec":
        for setting, value in (("entity", self.entity), ("name", self.name)):
            if value is not None and self.project is None:
                raise ValueError(
                    f"{setting} = {value} without `project`, so nothing is written; set it too"
                )
        return self


class LoggingSpec(Section):
    tensorboard: bool | PathText = False
    """true writes into the run folder (extra `tensorboard`), a folder to one of the run below."""
    wandb: WandbSpec = WandbSpec()
    """Weights & Biases, where the run is to be seen there."""


class Spec(Section):
    run: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)
    """Name of the run and of its folder: a-z, 0-9, dot, dash and underscore."""
    runs_dir: PathText = "runs"
    """Directory of the run folders."""
    resume: bool = False
    """Go on from the newest snapshot of an earlier run of this name, if there is one."""
    model: ModelSpec
    """What is trained."""
    data: DataSpec = DataSpec()
    """What it is trained on."""
    train: TrainSpec = TrainSpec()
    """Batch, optimizer and precision: all that the loss depends on."""
    cluster: ClusterSpec = ClusterSpec()
    """The processes of the run and where they live."""
    parallel: ParallelSpec = ParallelSpec()
    """Overlapping groups of the W workers; each degree divides W."""
    memory: MemorySpec = MemorySpec()
    """The bound of each peak; none changes the loss. Bytes may be written as 4GB or 512MiB."""
    snapshots: SnapshotsSpec = SnapshotsSpec()
    """When the state goes to disk."""
    metrics: MetricsSpec = MetricsSpec()
    """What is measured."""
    logging: LoggingSpec = LoggingSpec()
    """Experiment logs beside the run folder; one that fails is told of, and the run goes on."""

    @model_validator(mode="after")
    def parallel_degrees_divide_the_workers(self) -> "Spec":
        workers = self.cluster.workers
        for name, degree in self.parallel.degrees.items():
            if degree != "auto" and workers % degree:
                raise ValueError(
                    f"parallel.{name} = {degree} does not divide cluster.workers = {workers}; "
                    f"use one of {divisors(workers)}"
                )
        return self

    @model_validator(mode="after")
    def devices_update_what_shares_memory_with_them(self) -> "Spec":
        anywhere = self.cluster.optimizer_placement == "anywhere"
        if anywhere and self.memory.optimizer.update_on == "device":
            raise ValueError(
                "memory.optimizer.update_on = device needs the optimizer state in the memory of "
                "each worker's node, which cluster.optimizer_placement = anywhere does not give; "
                "set update_on to host, or optimizer_placement to beside"
            )
        return self

    @model_validator(mode="after")
    def mirrors_are_on_other_nodes_and_updated_there(self) -> "Spec":
        cluster, update_on = self.cluster, self.memory.optimizer.update_on
        placement = cluster.optimizer_placement
        # On CUDA an update has the same result as on the host but for rounding.
        for setting, value, suits, better in (
            ("cluster.address", cluster.address, cluster.address != "local", "auto"),
            ("cluster.optimizer_placement", placement, placement == "beside", "beside"),
            ("memory.optimizer.update_on", update_on, update_on == "host", "host"),
        ):
            if self.memory.optimizer.mirrors and not suits:
                raise ValueError(
                    "memory.optimizer.mirrors = 1 needs a cluster with workers on two nodes or "
                    "more, and optimizer actors beside them that do all updates, which "
                    f"{setting} = {value} does not give; set it to {better}, or mirrors to 0"
                )
        return self

    @model_validator(mode="after")
    def optimizer_actors_that_scale_have_updates_to_do(self) -> "Spec":
        scales = self.cluster.autoscale.optimizers is not None
        if scales and self.memory.optimizer.update_on == "device":
            raise ValueError(
                "cluster.autoscale.optimizers is of no use with memory.optimizer.update_on = "
                "device, where the workers do the updates; leave it out, or set update_on to host"
            )
        return self

    @model_validator(mode="after")
    def sequences_divide_over_their_ranks(self) -> "Spec":
        degree, length = self.parallel.sequence, self.train.sequence_length
        if degree != "auto" and length % degree:
            raise ValueError(
                f"train.sequence_length = {length} is no multiple of parallel.sequence = "
                f"{degree}; use {_multiples_near(length, degree)}"
            )
        return self

    @model_validator(mode="after")
    def steps_divide_into_equal_microbatches(self) -> "Spec":
        if self.parallel.sequence == "auto" or self.cluster.workers % self.parallel.sequence:
            return self
        replicas = self.cluster.workers // self.parallel.sequence
        unit = replicas * self.train.microbatches
        if self.train.sequences_per_step % unit:
            raise ValueError(
                f"train.sequences_per_step = {self.train.sequences_per_step} is no multiple of "
                f"{unit} = {replicas} sequence groups (cluster.workers / parallel.sequence) x "
                f"{self.train.microbatches} train.microbatches; use "
                f"{_multiples_near(self.train.sequences_per_step, unit)}"
            )
        return self


def parse_spec(data: Any, *, source: str = "job spec", overrides: Sequence[str] = ()) -> Spec:
    """The spec that `data`, a tree of plain mappings, describes.

    Raises SpecError with one line a problem: where it comes from, dotted path, value and what would
    be right. `source` is the name the message gives to the input, `overrides` are the assignments,
    like `train.steps=20`, that were made to it.
    """
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        text = describe_problems(error, data, Spec, source=source, overrides=overrides)
        raise SpecError(text) from None


def resolve_parallel(spec: Spec, *, experts: int, heads: int) -> Spec:
    """`spec` with every `auto` degree replaced by a number that suits the model.

    `experts` and `heads` are the model's routed experts a layer and its attention heads. D becomes
    1, E_p the largest divisor of W that is at most `experts`, P becomes W. Raises SpecError when a
    degree that was given, or the batch under the resolved ones, does not suit.
    """
    workers = spec.cluster.workers
    chosen = {
        "sequence": 1,
        "expert": max(degree for degree in divisors(workers) if degree <= experts),
        "vocabulary": workers,
    }
    given = {name: value for name, value in spec.parallel.degrees.items() if value != "auto"}
    resolved = parse_spec(spec.model_dump() | {"parallel": chosen | given})
    _check_heads(resolved, heads)
    _check_experts(resolved, experts)
    return resolved


def check_against_model(
    spec: Spec,
    *,
    experts: int,
    attention_heads: int,
    key_value_heads: int | None = None,
) -> None:
    """Raise SpecError when a degree of a resolved `spec` does not suit the model.

    Names the degree, its value and the values that are legal.
    """
    assert "auto" not in spec.parallel.degrees.values(), "resolve_parallel comes first"
    _check_heads(spec, attention_heads, key_value_heads)
    _check_experts(spec, experts)


def _check_heads(spec: Spec, heads: int, key_value_heads: int | None = None) -> None:
    shared = key_value_heads or heads

    def suits(degree: int) -> bool:
        # Key and value heads are repeated when there are fewer of them than ranks.
        return heads % degree == 0 and (shared % degree == 0 or degree % shared == 0)

    what = f"the model's {heads} attention heads"
    if key_value_heads is not None:
        what += f" and {key_value_heads} key-value heads"
    _check_degree(spec, "sequence", what, suits)


def _check_experts(spec: Spec, experts: int) -> None:
    _check_degree(spec, "expert", f"the model's {experts} experts", lambda e_p: e_p <= experts)


def _check_degree(spec: Spec, name: str, what: str, suits: Callable[[int], bool]) -> None:
    degree = spec.parallel.degrees[name]
    if degree == "auto" or suits(degree):
        return
    workers = spec.cluster.workers
    legal = [choice for choice in divisors(workers) if suits(choice)]
    raise SpecError(
        f"parallel.{name} = {degree} does not suit {what}; "
        f"with cluster.workers = {workers} use one of {legal}"
    )


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending; each up to its square root gives the one above it."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    high = [number // divisor for divisor in reversed(low) if divisor * divisor != number]
    return low + high


def _multiples_near(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
