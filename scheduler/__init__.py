"""Who runs when: the queue, the groups, KV blocks and step plans.

Two pure objects (``Cell`` and ``GroupScheduler``: no sockets, no clock) and one thread around them. Token ids in, token
ids out: this package never sees text, and imports neither torch nor ray nor a tokenizer.
"""
