"""What a run is: the command line, defaults that fit the machine, and checks that end in one clear line."""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import jax

SIZES = ("layers", "hidden", "heads", "mlp", "seq", "batch", "steps")
PRECISIONS = ("bf16", "f32", "delayed", "current")
FP8 = ("delayed", "current")
RESUMABLE = {"steps", "mesh", "checkpoint_every", "out", "resume"}  # what may differ when a run is resumed

# Sized so that both runs of a comparison take a few minutes on two CPU cores, or on one H200.
DEFAULTS = {
    "cpu": dict(layers=2, hidden=192, heads=6, seq=128, batch=16, steps=700, lr=1.5e-3, eval_batches=48),
    "gpu": dict(layers=8, hidden=1024, heads=16, seq=1024, batch=32, steps=600, lr=6e-4, eval_batches=16),
}

MOST_EMULATED = 256  # devices; beyond, JAX takes ages to start


class UsageError(Exception):
    """The user's mistake, in one line."""


@dataclass(frozen=True)
class Options:
    recipe: str | None  # None: compare FP8 delayed with the machine's ordinary precision
    compare: bool
    data: str | None
    layers: int
    hidden: int
    heads: int
    mlp: int
    seq: int
    steps: int
    batch: int
    lr: float
    warmup: int
    seed: int
    mesh: tuple[int, int]  # (data, model)
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    out: Path
    resume: bool

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the precisions to train in, the baseline first."""
        if self.recipe and not self.compare:
            return (self.recipe,)
        return (ordinary_precision(), self.recipe or "delayed")

    @property
    def file(self) -> Path:
        return self.out / "options.json"

    def save(self, fingerprint: str) -> None:
        """Keeps what --resume must know: the options, and which data they were used on."""
        values = asdict(self) | {"out": str(self.out), "fingerprint": fingerprint}
        self.file.write_text(json.dumps(values, indent=1) + "\n")


def saved_fingerprint(options: Options) -> str:
    """The fingerprint of the data that the run in --out began with."""
    return json.loads(options.file.read_text())["fingerprint"]


def ordinary_precision() -> str:
    return "f32" if jax.default_backend() == "cpu" else "bf16"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def _mesh(text: str) -> tuple[int, int]:
    """(4, 2) of "data=4,model=2"."""
    sizes = {"data": 1, "model": 1}
    items = [item.partition("=") for item in text.split(",")]
    for name, _, size in items:
        if name not in sizes or not size.isdecimal() or int(size) < 1 or [item[0] for item in items].count(name) > 1:
            raise argparse.ArgumentTypeError(f"expected something like data=4,model=2, got '{text}'")
        sizes[name] = int(size)
    return sizes["data"], sizes["model"]


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty one")
    return os.path.abspath(text)


def _folder(text: str) -> Path:
    _path(text)
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_gpt",
        description="Train a byte-level GPT in FP8 and in ordinary precision. Defaults fit the machine.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--recipe", choices=PRECISIONS, help="train in this precision only; without it, compare")
    add("--compare", action="store_true", help="train the baseline as well as the FP8 --recipe (default: delayed)")
    add("--data", type=_path, metavar="PATH", help="file or folder (default: Python's standard library)")
    for name in (*SIZES, "warmup"):
        add(f"--{name}", type=int, metavar="N")
    add("--lr", type=float, help="peak learning rate")
    add("--seed", type=int, metavar="N")
    add("--mesh", type=_mesh, metavar="data=D,model=M", help="shard over D x M devices; a CPU emulates them")
    add("--eval-every", type=int, metavar="STEPS")
    add("--eval-batches", type=int, metavar="N")
    add("--checkpoint-every", type=int, metavar="STEPS")
    add("--out", type=_folder, metavar="DIR", help="where results go (default: a new folder in runs/)")
    add("--resume", action="store_true", help="continue the run in --out")
    return parser


def parse(argv: list[str] | None = None) -> Options:
    """Options of the command line, completed and checked. Raises UsageError."""
    given = vars(_parser().parse_args(argv))
    saved = _saved(given) if given.get("resume") else {}
    known = {field.name for field in fields(Options)}
    try:
        mesh = given.get("mesh", tuple(saved.get("mesh", (1, 1))))
        _emulate_devices(mesh[0] * mesh[1])
        values = {name: value for name, value in saved.items() if name in known} | given | {"mesh": mesh}
        options = _complete(values)
        _check(options)
    except (TypeError, IndexError):
        if not saved:
            raise
        raise UsageError(f"--resume: {given['out'] / 'options.json'} is damaged") from None
    return options


def _saved(given: dict) -> dict:
    """The options that the run in --out began with."""
    if "out" not in given:
        raise UsageError("--resume needs --out DIR, the folder of the run to continue")
    try:
        saved = json.loads((given["out"] / "options.json").read_text())
        saved["fingerprint"]  # every run has one
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(f"--resume: {given['out']} holds no run") from None
    for name, value in given.items():
        if name not in RESUMABLE and saved.get(name) != value:
            raise UsageError(
                f"--resume: the run in {given['out']} has --{name.replace('_', '-')} {saved.get(name)}, not {value}"
            )
    return saved


def _emulate_devices(count: int) -> None:
    """Lets a CPU appear as `count` devices. Only has an effect before JAX's first look at the devices."""
    count = min(count, MOST_EMULATED)
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def _complete(values: dict) -> Options:
    values = DEFAULTS["cpu" if jax.default_backend() == "cpu" else "gpu"] | values
    steps = values["steps"]
    derived = {
        "recipe": None,
        "compare": False,
        "data": None,
        "mlp": 4 * values["hidden"],
        "warmup": min(steps // 10, 200),
        "seed": 0,
        "eval_every": max(1, steps // 4),
        "checkpoint_every": max(1, steps // 4),
        "out": Path("runs") / time.strftime("gpt-%Y%m%d-%H%M%S"),
        "resume": False,
    }
    options = Options(**(derived | values))
    return replace(options, out=Path(options.out))


def _check(options: Options) -> None:
    for name in (*SIZES, "eval_every", "eval_batches", "checkpoint_every"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 < options.lr < float("inf"):
        raise UsageError(f"--lr must be positive, got {options.lr}")
    if not 0 <= options.warmup <= options.steps:
        raise UsageError(f"--warmup must be between 0 and --steps {options.steps}, got {options.warmup}")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed must be between 0 and 2**32 - 1, got {options.seed}")
    if options.compare and options.recipe not in (None, *FP8):
        raise UsageError(f"--compare needs an FP8 recipe, {' or '.join(FP8)}, or none; got {options.recipe}")
    if options.hidden % options.heads or options.hidden // options.heads % 2:
        raise UsageError(f"--hidden {options.hidden} over --heads {options.heads}: a head needs an even, whole size")
    data, model = options.mesh
    if options.batch % data:
        raise UsageError(f"--mesh data={data} must divide --batch {options.batch}")
    for name in ("heads", "mlp"):
        if getattr(options, name) % model:
            raise UsageError(f"--mesh model={model} must divide --{name} {getattr(options, name)}")
    if (found := jax.device_count()) < data * model:
        kind = jax.default_backend().upper()
        raise UsageError(f"--mesh data={data},model={model} needs {data * model} devices; JAX sees {found} ({kind})")
    _check_memory(options)


def _check_memory(options: Options) -> None:
    """Refuses what can't fit by a lower bound: parameter, gradient, two moments, and the layers' saved activations."""
    layer = 4 * options.hidden**2 + 2 * options.hidden * options.mlp
    state = 16 * (options.layers * layer + 256 * options.hidden)
    activations = 2 * options.batch * options.seq * options.layers * (6 * options.hidden + options.mlp)
    need = state // options.mesh[1] + activations // (options.mesh[0] * options.mesh[1])
    if jax.default_backend() == "cpu":
        need *= options.mesh[0] * options.mesh[1]
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        have = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    if need > have:
        raise UsageError(f"this model and batch need at least {need / 2**30:,.0f} GiB; there are {have / 2**30:,.0f}")
