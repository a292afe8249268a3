"""Checkpoints of a run through orbax, and the polite end on Ctrl-C."""

import contextlib
import logging
import signal
from pathlib import Path

import orbax.checkpoint as ocp

from .options import UsageError
from .training import TrainState

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax reports each file it touches, and what it raises too


def has_checkpoint(folder: Path) -> bool:
    """Whether a state can be restored from the folder."""
    return any(entry.name.isdecimal() for entry in folder.glob("*"))


class Checkpoints:
    """The last two states of a run. The step number is the position in the data too: see data.py."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with self._written():
            self._manager.close()  # waits for what is still being written

    @contextlib.contextmanager
    def _written(self):
        """UsageError where a checkpoint could not be written, this one or the one before: orbax reports late."""
        try:
            yield
        except (ValueError, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise UsageError(f"a checkpoint could not be written to {self._manager.directory}: {reason}") from error

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Copies the state before it returns, so that the next step may take its memory over; writes it meanwhile."""
        if step != self.latest_step:
            with self._written():
                self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def restore(self, abstract_state: TrainState) -> TrainState:
        """The latest state, laid out as `abstract_state` says. Raises UsageError where it can't be."""
        try:
            return self._manager.restore(self.latest_step, args=ocp.args.StandardRestore(abstract_state))
        except (ValueError, KeyError) as error:
            where = self._manager.directory / str(self.latest_step)
            raise UsageError(f"--resume: the checkpoint {where} is damaged or of another model") from error


class Interruption:
    """Turns the first SIGINT or SIGTERM into a flag that the training loop reads; the second one acts as usual."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.requested = False
        self._previous = {number: signal.signal(number, self._note) for number in self.signals}
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        self.requested = True
        self.__exit__()
