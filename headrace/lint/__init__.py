"""The wire lint: holds any OpenAI-compatible server against the contract, from outside, on the bytes it sends.

``wire`` reads HTTP/1.1 and ``strict`` JSON and event streams without forgiving anything; a ``Session`` sends what a
check asks for and keeps every exchange; the checks are in ``areas``, one module per area; ``everywhere`` judges each
exchange that any check made. Knows nothing of how a server is built, and talks to no address but the one given.
"""
