"""Files of TensorBoard events, written in the thread that has the numbers, where an error can be raised and told."""

import pathlib
import secrets
import socket
import time

from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2, summary_pb2

from experiments.engine import disk


class Events:
    """A new file of events in the folder, for a run that starts, or goes on, at step `start`.

    Methods raise the OSError of a disk that takes no more.
    """

    EVERY_SECONDS = 30.0  # what is written reaches the disk at least so often

    def __init__(self, folder: pathlib.Path, *, start: int):
        # `start` puts files of one second in order; nobody can have put a link under a name with random digits.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start}.{secrets.token_hex(4)}"
        self._records = record_writer.RecordWriter(str(disk.folder(folder.parent, folder.name) / name))
        self._flushed = -self.EVERY_SECONDS
        self._add(file_version="brain.Event:2")
        if start:  # what an earlier session wrote of later steps does not count
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=start + 1, session_log=session)

    def write(self, step: int, values: dict[str, float]) -> None:
        """These scalars, by their names."""
        scalars = [value for name, x in values.items() for value in summary.scalar(name, x).value]
        self._add(step=step, summary=summary_pb2.Summary(value=scalars))
        if time.monotonic() - self._flushed >= self.EVERY_SECONDS:
            self._flushed = time.monotonic()
            self._records.flush()

    def _add(self, **parts) -> None:
        self._records.write(event_pb2.Event(wall_time=time.time(), **parts).SerializeToString())

    def close(self) -> None:
        """Write what is left; the file is closed also where that fails."""
        self._records.close()
