"""Ways to run the decoder over a paged KV pool, behind one small interface."""
