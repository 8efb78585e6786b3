"""The decoder and its weights: configuration, checkpoints in both formats, rotary embedding. Knows nothing of plans."""
