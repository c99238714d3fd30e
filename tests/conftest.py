"""For the whole suite: threads that wait sleep, so that a busy machine does not slow the tests tenfold."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.toys", "tests.wording", "tests.pictures"]
