"""Worker groups, frontends and clients that cost almost nothing, around a real scheduler.

``group``, ``frontend`` and ``workload`` are the same in both modes: ``virtual`` drives a Cell directly on a clock that
jumps from event to event, ``sockets`` a scheduler process over its real sockets as time passes. For benchmarks and
tests; nothing here serves anyone.
"""
