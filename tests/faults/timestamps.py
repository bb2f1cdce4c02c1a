"""How ranks and the launching process tell each other of a session, where no exchange may be used: through files."""

import json
import os
import time
from pathlib import Path

# Seconds that a rank waits for a timestamp. It is there long before, or something is wrong.
_TIMESTAMP = 60.0


def stamp():
    """Seconds of a clock that is one for all processes: no fault changes it, and nothing but records depends on it."""
    return time.clock_gettime(time.CLOCK_REALTIME)


class Timestamps:
    """Files that tell ranks and the launching process how far a session has come."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def put(self, name, value=None):
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(stamp() if value is None else value))
        draft.rename(self.folder / name)

    def get(self, name):
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def wait(self, name):
        until = time.monotonic() + _TIMESTAMP
        while self.get(name) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody has put the timestamp {name}")
            time.sleep(0.005)


def met(call, *arguments, **options):
    """The error that a call raises, of any kind, with the time; None if there is none."""
    try:
        call(*arguments, **options)
    except Exception as error:
        error.raised_at = stamp()
        return error
    return None
