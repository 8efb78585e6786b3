"""Text: chat templates, encoding, decoding, stop strings. Knows nothing of HTTP, sockets or engines."""
