"""Settings of the test process that must precede the imports of any test."""

from __future__ import annotations

import os

from hypothesis import settings

from workers.threads import SPIN_COUNT

# Read when torch loads its OpenMP runtime; ranks get the same from their launcher.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

# No test judges by the clock. A red run means a change broke something: only `make test-long`, and whoever asks for the
# other profile, looks for new examples.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
