"""From a request's bytes to what the scheduler is asked for: fields, checks, prompts, limits."""
