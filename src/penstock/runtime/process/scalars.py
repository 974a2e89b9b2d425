"""How a run goes, for TensorBoard. Needs the tensorboard package, which Penstock does without otherwise."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.errors import JobError
from penstock.record import Mark, Moment, Start

FLUSH_S = 10


def check_tensorboard() -> None:
    """Before anything is started for it."""
    try:
        version("tensorboard")
    except PackageNotFoundError:
        raise JobError(
            "--tensorboard needs the tensorboard package, which is not installed; pip install 'penstock[tensorboard]'"
        ) from None


class Scalars:
    """A listener at worker 0; everything stands at the minibatch up to which was trained."""

    def __init__(self, directory: Path, start: Start) -> None:
        check_tensorboard()
        from torch.utils.tensorboard.writer import SummaryWriter

        self.start = start
        self._writer = SummaryWriter(str(directory), flush_secs=FLUSH_S)
        self._before: Moment | None = None

    def moment(self, moment: Moment) -> None:
        step = self.start.minibatch(moment.samples)
        if moment.loss is not None:
            self._writer.add_scalar("loss", moment.loss, step)
        since_s = moment.at_s - (self._before.at_s if self._before else 0.0)
        if since_s > 0:
            added = moment.samples - (self._before.samples if self._before else 0)
            self._writer.add_scalar("samples per second", added / since_s, step)
        for worker, (busy, num_bytes) in enumerate(zip(moment.busy, moment.memory_bytes, strict=True)):
            self._writer.add_scalar(f"busy/worker {worker}", busy, step)
            if num_bytes is not None:
                self._writer.add_scalar(f"memory/worker {worker}", num_bytes, step)
        self._before = moment

    def mark(self, mark: Mark) -> None:
        for name, value in mark.values.items():
            if value is not None:
                self._writer.add_scalar(f"{mark.kind}/{name}", value, mark.minibatch)

    def end(self, words: str) -> None:
        self._writer.close()
