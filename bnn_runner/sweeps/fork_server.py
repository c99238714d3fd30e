"""Imported first by the server from which `child_process` forks jobs, and nowhere else.

Schedulers send signals to every process of a job. The server must survive them, because it reports the exit codes of
its children. It ends with the process that started it.
"""

from __future__ import annotations

import signal

from bnn_runner.runtime.signals import STOPPING

for _number in STOPPING:
    signal.signal(_number, signal.SIG_IGN)
