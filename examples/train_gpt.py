"""Trains a byte-level GPT in FP8, and beside it in the machine's ordinary precision, on any machine.

    python examples/train_gpt.py                        # compare, with defaults that fit the machine
    python examples/train_gpt.py --recipe current       # one run
    python examples/train_gpt.py --mesh data=4,model=2  # sharded; on a CPU over emulated devices

The training step itself is in gpt/training.py.
"""

import math
import shlex
import sys
import time
from collections import deque

import jax
import jax.numpy as jnp
from gpt import options as gpt_options
from gpt import report
from gpt.checkpoint import Checkpoints, Interruption, has_checkpoint
from gpt.data import Data, DataError, load
from gpt.model import GPT
from gpt.options import Options, UsageError
from gpt.record import Record
from gpt.training import FP8_RECIPES, Training, adamw, make_mesh

RUN_AHEAD = 2  # steps the loop may be ahead of the loss it shows, so that the device never waits for the host


def build(options: Options, name: str) -> Training:
    """The run called `name`, a precision or an FP8 recipe. With FP8 the rest stays in the ordinary precision."""
    precision = gpt_options.ordinary_precision() if name in FP8_RECIPES else name
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[precision]
    return Training(
        model=GPT(options.layers, options.hidden, options.heads, options.mlp, dtype),
        optimizer=adamw(options.lr, options.warmup, options.steps),
        mesh=make_mesh(*options.mesh),
        batch_shape=(options.batch, options.seq + 1),
        fp8_recipe=FP8_RECIPES.get(name),
        seed=options.seed,
    )


def train(options: Options, name: str, data: Data, interruption: Interruption) -> Record:
    """Trains from the latest checkpoint, or from scratch, to the last step or to an interruption."""
    training = build(options, name)
    folder = options.out / name
    shape = (options.batch, options.seq)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        start = checkpoints.latest_step or 0
        if start > options.steps:
            raise UsageError(f"--steps {options.steps}: the checkpoint of {name} in {options.out} is at step {start}")
        state = checkpoints.restore(training.abstract_state) if start else training.init()
        with (
            Record(name, folder / "metrics.jsonl", start) as record,
            report.progress(name, options.steps, start) as show,
        ):
            pending = deque()  # (step, loss) of steps that the device may still be computing
            compiled_step = training.compiled_step
            began = time.perf_counter()

            def settle(count: int) -> None:
                """Waits until at most `count` steps are pending; records and shows the others."""
                while len(pending) > count:
                    step, loss = pending.popleft()
                    loss = float(loss)
                    if not math.isfinite(loss):
                        raise UsageError(
                            f"the loss of {name} is {loss} at step {step}: take less than --lr {options.lr}"
                        )
                    speed = (step - start) * options.batch * options.seq / (time.perf_counter() - began)
                    record.train(step, loss, speed)
                    show(step, loss, speed)

            for step in range(start + 1, options.steps + 1):
                windows = data.train_batch(options.seed, step, *shape)
                state, loss = compiled_step(state, training.put(windows))
                pending.append((step, loss))
                last = step == options.steps or interruption.requested
                evaluate = step % options.eval_every == 0 or step == options.steps
                save = step % options.checkpoint_every == 0 or last
                settle(0 if evaluate or save else RUN_AHEAD)
                paused = time.perf_counter()
                if evaluate:
                    batches = data.validation_batches(options.eval_batches, *shape)
                    record.evaluate(step, training.evaluate(state, batches))
                if save:
                    checkpoints.save(step, state)
                began += time.perf_counter() - paused  # the speed is that of training alone
                if last:
                    break
            if start == options.steps and start not in record.validation:  # it was stopped right there
                record.evaluate(start, training.evaluate(state, data.validation_batches(options.eval_batches, *shape)))
    return record


def prepare(options: Options, data: Data) -> None:
    """Makes the output folder ready. Raises UsageError rather than overwrite a run or resume a missing one."""
    folders = [options.out / name for name in options.runs]
    begun = [str(folder) for folder in folders if has_checkpoint(folder / "checkpoints")]
    if options.resume:
        if gpt_options.saved_fingerprint(options) != data.fingerprint:
            raise UsageError(f"--resume: the data isn't what the run in {options.out} began with")
        if not begun:
            raise UsageError(f"--resume: {options.out} holds no checkpoint")
    elif begun:
        raise UsageError(f"{' and '.join(begun)} already there: --resume continues, another --out starts afresh")
    try:
        for folder in folders:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        options.save(data.fingerprint)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}") from error


def run(options: Options) -> int:
    """Trains all runs of `options` and reports. Returns the exit code."""
    data = load(options.data, options.seq)
    if (windows := options.eval_batches * options.batch) > len(data.validation):
        raise UsageError(f"--eval-batches {options.eval_batches}: {windows} windows of {len(data.validation)} bytes")
    prepare(options, data)
    report.print_start(options, data)
    records = []
    with Interruption() as interruption:
        for name in options.runs:
            record = train(options, name, data, interruption)
            if interruption.requested:
                again = shlex.join([sys.executable, sys.argv[0], "--out", str(options.out), "--resume"])
                report.say(f"stopped {name} after step {record.last_step} of {options.steps}; continue with\n  {again}")
                return 130
            records.append(record)
    report.print_end(options, records, data)
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(gpt_options.parse(argv))
    except (UsageError, DataError) as error:
        message = str(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = "the device's memory is too small for this run; lower --batch, --seq or --hidden, or raise --mesh"
    except OSError as error:  # a full disk, a folder where a file should be
        message = f"{error.filename or 'writing'}: {error.strerror or error}"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"train_gpt: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
