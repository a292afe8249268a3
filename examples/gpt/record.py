"""What a run measured, kept in memory for the report and as JSON lines for everybody else."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LAST_STEPS = 20  # the final training loss is a mean over these; a single batch is too noisy


def _read(path: Path) -> Iterator[dict]:
    """The lines that are there, up to one that a killed process left unfinished."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


class Record:
    """Losses and speed of one run. Lines of `metrics.jsonl` hold step and loss, or step and validation_loss."""

    def __init__(self, name: str, path: Path, resume_at: int):
        """Takes up the lines that an earlier process wrote up to step `resume_at`; later ones are trained again."""
        self.name = name
        self.losses: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        self.tokens_per_second = 0.0
        lines = list(_read(path))
        self._file = path.open("w")
        for line in lines:
            if line["step"] <= resume_at:
                self._add(**line)

    def train(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._add(step=step, loss=loss, tokens_per_second=round(tokens_per_second, 1))

    def evaluate(self, step: int, loss: float) -> None:
        self._add(step=step, validation_loss=loss)

    def _add(self, step, loss=None, validation_loss=None, tokens_per_second=None):
        if loss is not None:
            self.losses[step] = loss
            self.tokens_per_second = tokens_per_second
            line = {"step": step, "loss": loss, "tokens_per_second": tokens_per_second}
        else:
            self.validation[step] = validation_loss
            line = {"step": step, "validation_loss": validation_loss}
        print(json.dumps(line), file=self._file, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    @property
    def last_step(self) -> int:
        return max(self.losses, default=0)

    @property
    def train_loss(self) -> float:
        """NaN where the file of a run that is over was lost."""
        losses = [loss for _, loss in sorted(self.losses.items())[-LAST_STEPS:]]
        return float(np.mean(losses)) if losses else float("nan")

    @property
    def validation_loss(self) -> float:
        return self.validation[max(self.validation)]
