"""What the user sees: progress while training, and at the end a table and a picture."""

from contextlib import contextmanager
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .data import Data
from .options import Options
from .record import Record

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text, markup=False)


def print_start(options: Options, data: Data) -> None:
    source = options.data or "Python's standard library"
    say(f"data: {source}, {len(data.train):,} bytes to train on, {len(data.validation):,} to validate on")
    say(f"unigram entropy: {data.unigram_entropy:.4f} nats per byte")
    devices = options.mesh[0] * options.mesh[1]
    say(f"{' and '.join(options.runs)}, {options.steps} steps on {devices} x {jax.devices()[0].device_kind}")


def print_end(options: Options, records: list[Record], data: Data) -> None:
    picture = options.out / "loss.png"
    _draw(records, data.unigram_entropy, picture)
    _print_table(records, data.unigram_entropy)
    say(f"picture: {picture}")
    say("metrics: " + " ".join(str(options.out / record.name / "metrics.jsonl") for record in records))


@contextmanager
def progress(name: str, steps: int, start: int):
    """Yields show(step, loss, tokens_per_second): a bar on a terminal, else about ten plain lines."""
    if not console.is_terminal:
        every = max(1, steps // 10)

        def line(step, loss, tokens_per_second):
            if step % every == 0 or step == steps:
                console.print(f"{name}: step {step}/{steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s")

        yield line
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[status]}", TimeRemainingColumn())
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), console=console) as bar:
        task = bar.add_task(name, total=steps, completed=start, status="compiling")
        yield lambda step, loss, tokens_per_second: bar.update(
            task, completed=step, status=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        )


def _print_table(records: list[Record], unigram_entropy: float) -> None:
    """One row a run; differences are relative to the first row, the baseline."""
    table = Table(title="loss in nats per byte")
    table.add_column("run")
    for heading in ("training", "difference", "validation", "difference", "tokens/s"):
        table.add_column(heading, justify="right")
    baseline = records[0]
    for record in records:
        cells = []
        for loss, reference in (
            (record.train_loss, baseline.train_loss),
            (record.validation_loss, baseline.validation_loss),
        ):
            cells += [f"{loss:.4f}", "" if record is baseline else f"{100 * (loss / reference - 1):+.2f} %"]
        table.add_row(record.name, *cells, f"{record.tokens_per_second:,.0f}")
    table.add_row("unigram entropy", "", "", f"{unigram_entropy:.4f}", "", "")
    console.print(table)


def _draw(records: list[Record], unigram_entropy: float, path: Path) -> None:
    """Loss curves of all runs: training faint and smoothed, validation as marks."""
    plt.switch_backend("Agg")  # needs no display
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    styles = (("tab:blue", "-", "o"), ("tab:orange", "--", "x"))
    for record, (colour, dashes, mark) in zip(records, styles, strict=False):
        if record.losses:
            steps, losses = np.array(sorted(record.losses.items())).T
            axes.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.8)
            axes.plot(steps, _smooth(losses), dashes, color=colour, linewidth=1.6, label=f"{record.name} train")
        if record.validation:
            steps, losses = np.array(sorted(record.validation.items())).T
            axes.plot(steps, losses, mark, markersize=8, color=colour, label=f"{record.name} validation")
    axes.axhline(unigram_entropy, color="grey", linestyle=":", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level GPT")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Running mean over a fiftieth of the curve, narrower at its ends."""
    half = len(losses) // 100
    total = np.concatenate(([0.0], np.cumsum(losses)))
    index = np.arange(len(losses))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(losses))
    return (total[high] - total[low]) / (high - low)
