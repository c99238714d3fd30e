"""Imported first by the server that `isolation` forks jobs from, and by nothing else.

Schedulers signal every process of a job; the server must outlive that, as it tells how its children
ended. It ends by itself with the process that started it.
"""

from __future__ import annotations

import signal

from bnn_runner.runtime.signals import STOPPING

for _number in STOPPING:
    signal.signal(_number, signal.SIG_IGN)
