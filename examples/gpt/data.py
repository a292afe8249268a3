"""Text as bytes: where it is found, how it is split, and which bytes make up batch number i.

A batch is a pure function of (seed, step). So the step is the whole position in the data, and a resumed
run sees exactly the bytes that an uninterrupted one would have seen.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

VOCABULARY = 256
VALIDATION_SHARE = 20  # one file (or byte) in 20 is kept for validation
END_OF_FILE = b"\0"
FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """The data can't be used; the message says why in one line."""


@dataclass(frozen=True)
class Data:
    """Bytes to train on and bytes to validate on."""

    train: np.ndarray  # u8[T]
    validation: np.ndarray  # u8[V]

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that sees no context: what a trained model must beat."""
        counts = sum(np.bincount(part, minlength=VOCABULARY) for part in (self.train, self.validation))
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    @cached_property
    def fingerprint(self) -> str:
        """Tells whether a run is resumed on the data that it began with."""
        digest = hashlib.sha256(self.train)
        digest.update(self.validation)
        return digest.hexdigest()[:16]

    def train_batch(self, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
        """u8[batch, seq + 1] windows at random places; the same ones for the same seed and step."""
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - seq, size=batch)
        return _windows(self.train, starts, seq)

    def validation_batches(self, count: int, batch: int, seq: int) -> Iterator[np.ndarray]:
        """`count` times u8[batch, seq + 1]: the same evenly spread windows at every call."""
        starts = np.linspace(0, len(self.validation) - seq - 1, count * batch).astype(np.int64)
        for rows in starts.reshape(count, batch):
            yield _windows(self.validation, rows, seq)


def load(path: str | None, seq: int) -> Data:
    """Reads a file, every file of a folder, or (None) the source code of Python's standard library.

    Folders are split by file, told by the hash of the relative path, so that the split never changes. A single
    file is split by position, and so is a folder with too few files for both parts to hold a window of
    seq + 1 bytes. Raises DataError.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"--data {root}: no such file or folder")
    try:
        if root.is_file():
            parts = _by_position(root.read_bytes())
        else:
            files = _files(root, "*.py" if path is None else "*")
            parts = _by_file(root, files)
            if min(map(len, parts)) <= seq:
                parts = _by_position(b"".join(file.read_bytes() + END_OF_FILE for file in files))
    except OSError as error:
        raise DataError(f"--data {root}: {error.strerror or error}: {error.filename}") from error
    size = sum(map(len, parts))
    if size == 0:
        raise DataError(f"--data {root}: holds no bytes")
    if min(map(len, parts)) <= seq:
        need = VALIDATION_SHARE * (seq + 1)
        raise DataError(f"--data {root}: {size} bytes are too few for --seq {seq} (needs about {need} bytes)")
    return Data(*(np.frombuffer(part, np.uint8) for part in parts))


def _files(root: Path, pattern: str) -> list[Path]:
    """Regular files below `root` in a fixed order; installed packages and hidden folders are left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in FOREIGN_FOLDERS and not name.startswith(".")]
        found += [path for name in names if (path := Path(folder, name)).match(pattern) and path.is_file()]
    return sorted(found)


def _by_file(root: Path, files: list[Path]) -> tuple[bytes, bytes]:
    train, validation = bytearray(), bytearray()
    for file in files:
        digest = hashlib.sha256(file.relative_to(root).as_posix().encode(errors="surrogateescape")).digest()
        part = validation if digest[0] % VALIDATION_SHARE == 0 else train
        part += file.read_bytes() + END_OF_FILE
    return bytes(train), bytes(validation)


def _by_position(text: bytes) -> tuple[bytes, bytes]:
    cut = len(text) - len(text) // VALIDATION_SHARE
    return text[:cut], text[cut:]


def _windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(seq + 1)]
