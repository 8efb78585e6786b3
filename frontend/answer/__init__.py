"""From token ids to the bytes a client gets: one answer, two transports."""
