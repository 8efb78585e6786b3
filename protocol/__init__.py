"""What crosses a process boundary: messages, versions, identifiers and sockets.

This package knows how processes talk and nothing of what any role does with a message.
"""
