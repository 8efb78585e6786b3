"""The fault laboratory: real processes are killed and stopped, and every stream is held to the undisturbed run.

``python -m tests.faults`` (``make faults``) runs the whole matrix and prints one line a scenario; the short form is
test_faults.py. ``ledger`` records what clients see, ``laboratory`` runs a server and hurts it, ``scenarios`` says what
is hurt when, ``report`` prints.
"""
