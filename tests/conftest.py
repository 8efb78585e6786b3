"""Settings of the test process that must precede the imports of any test."""

from __future__ import annotations

import os

from hypothesis import settings

from workers.threads import SPIN_COUNT

# Read when torch loads its OpenMP runtime; ranks get the same from their launcher.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

# No test judges by the clock.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
